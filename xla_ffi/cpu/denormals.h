// Flushes subnormal numbers to zero and rounds to nearest on this thread, as XLA's threads do, while an object lives.
// Results then do not depend on the thread's mode, and moments that decay to zero stay fast.
#ifndef JAXFERRY_CPU_DENORMALS_H_
#define JAXFERRY_CPU_DENORMALS_H_

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jaxferry {

class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(Get()) {
#if defined(__SSE2__)
    Set(0x9fc0);  // to nearest, no exceptions, flush to zero, denormals are zero
#elif defined(__aarch64__)
    Set(uint64_t{1} << 24);
#endif
  }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;
  ~DenormalsAreZero() { Set(before_); }

 private:
#if defined(__SSE2__)
  using Control = uint32_t;
  static Control Get() { return _mm_getcsr(); }
  static void Set(Control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static Control Get() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void Set(Control control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  using Control = int;
  static Control Get() { return 0; }
  static void Set(Control) {}
#endif

  Control before_;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_DENORMALS_H_
