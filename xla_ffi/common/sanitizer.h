// Tells the thread sanitizer what it cannot see: XLA, which is not built for it, starts a handler after whoever asked for
// it has, and gives nobody its results before it has ended. Nothing in other builds.
#ifndef JAXFERRY_COMMON_SANITIZER_H_
#define JAXFERRY_COMMON_SANITIZER_H_

#ifdef __SANITIZE_THREAD__
#include "common/exports.h"

extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace jaxferry {

// What was done before a thread released the address of `jaxferry_build_info` happens before what this thread does now:
// threads do so before they have XLA run something (tests/native/sanitized.py).
inline void NoteBegun() {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(reinterpret_cast<void*>(&jaxferry_build_info));
#endif
}

// What this thread has done so far happens before what a thread does that has waited for XLA, and then acquired the
// address of `jaxferry_abi`.
inline void NoteEnded() {
#ifdef __SANITIZE_THREAD__
  __tsan_release(reinterpret_cast<void*>(&jaxferry_abi));
#endif
}

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_SANITIZER_H_
