#include "cpu/host_step_kernels.h"

#include <algorithm>
#include <atomic>

namespace jaxferry {

namespace {

std::atomic<Simd> simd_limit{Simd::kAvx512Bf16};

Simd FindSimd() {
#ifdef JAXFERRY_HAS_AVX
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Simd::kPortable;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return Simd::kAvx2;
  return __builtin_cpu_supports("avx512bf16") ? Simd::kAvx512Bf16 : Simd::kAvx512;
#else
  return Simd::kPortable;
#endif
}

}  // namespace

Simd BestSimd() {
  static const Simd simd = FindSimd();
  return simd;
}

Simd CurrentSimd() { return std::min(simd_limit.load(), BestSimd()); }

void SetSimd(Simd simd) { simd_limit.store(simd); }

StepKernel CurrentStepKernel() {
  switch (CurrentSimd()) {
#ifdef JAXFERRY_HAS_AVX
    case Simd::kAvx2:
      return StepAvx2;
    case Simd::kAvx512:
      return StepAvx512;
    case Simd::kAvx512Bf16:
      return StepAvx512Bf16;
#endif
    default:
      return StepPortable;
  }
}

}  // namespace jaxferry
