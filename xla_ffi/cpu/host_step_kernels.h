// The step's kernels, one per instruction set, and their selection. No XLA types.
#ifndef JAXFERRY_CPU_HOST_STEP_KERNELS_H_
#define JAXFERRY_CPU_HOST_STEP_KERNELS_H_

#include "cpu/host_step.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define JAXFERRY_HAS_AVX 1
#endif

// Compiles the enclosed code for other instructions than the rest of the library.
#if defined(__clang__)
#define JAXFERRY_PRAGMA(text) _Pragma(#text)
#define JAXFERRY_BEGIN_TARGET(features) \
  JAXFERRY_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define JAXFERRY_END_TARGET _Pragma("clang attribute pop")
#else
#define JAXFERRY_PRAGMA(text) _Pragma(#text)
#define JAXFERRY_BEGIN_TARGET(features) _Pragma("GCC push_options") JAXFERRY_PRAGMA(GCC target(features))
#define JAXFERRY_END_TARGET _Pragma("GCC pop_options")
#endif

namespace jaxferry {

// In ascending order: a machine that supports one supports all before it.
enum class Simd { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

using StepKernel = void (*)(const HostStep& step, const StepPart& part);

void StepPortable(const HostStep& step, const StepPart& part);
void StepAvx2(const HostStep& step, const StepPart& part);
void StepAvx512(const HostStep& step, const StepPart& part);
void StepAvx512Bf16(const HostStep& step, const StepPart& part);

// The machine's best.
Simd BestSimd();

// The one in use: the best, unless SetSimd requested a lower one.
Simd CurrentSimd();

void SetSimd(Simd simd);

StepKernel CurrentStepKernel();

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_HOST_STEP_KERNELS_H_
