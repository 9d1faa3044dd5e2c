// Tells the thread sanitizer about the order that XLA guarantees but, not being instrumented, hides from it: a handler
// starts after its caller's earlier work, and its results are visible only after it ends. Empty in other builds.
#ifndef JAXFERRY_COMMON_SANITIZER_H_
#define JAXFERRY_COMMON_SANITIZER_H_

#ifdef __SANITIZE_THREAD__
#include "common/exports.h"

extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace jaxferry {

// Acquires the address of `jaxferry_build_info`, which callers release before they have XLA run something
// (tests/native/sanitized.py). Their earlier work then happens before this thread's next.
inline void NoteBegun() {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(reinterpret_cast<void*>(&jaxferry_build_info));
#endif
}

// Releases this thread's work so far to threads that wait for XLA and then acquire the address of `jaxferry_abi`.
inline void NoteEnded() {
#ifdef __SANITIZE_THREAD__
  __tsan_release(reinterpret_cast<void*>(&jaxferry_abi));
#endif
}

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_SANITIZER_H_
