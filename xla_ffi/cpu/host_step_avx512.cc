// The step with AVX-512, sixteen numbers at once, with and without its bfloat16 conversion.
#include "cpu/bits.h"
#include "cpu/host_step_kernels.h"

#ifdef JAXFERRY_HAS_AVX

#include <immintrin.h>

#ifndef __clang__
// GCC warns about undefined vectors in its own headers (bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace jaxferry {

JAXFERRY_BEGIN_TARGET("avx512f,avx512bw,f16c")

namespace avx512 {

struct Vector {
  using F = __m512;
  using I = __m512i;
  static constexpr int64_t kLanes = 16;

  static F Set(float x) { return _mm512_set1_ps(x); }
  static F Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(F x, float* to) { _mm512_storeu_ps(to, x); }

  static __m256i Load16(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void Store16(__m256i x, uint16_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }

  static F LoadBfloat16(const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load16(from)), 16));
  }

  static F LoadFloat16(const uint16_t* from) { return _mm512_cvtph_ps(Load16(from)); }

  static __m256i ToBfloat16(F x) {
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, nan));
  }

  // Of numbers below 2^16.
  static __m256i Narrow(__m512i x) { return _mm512_cvtepi32_epi16(x); }

  static I LoadCodes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static void StoreCodes(I x, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
  }

  static bool AnyBelowOne(I x) { return _mm512_cmplt_epi32_mask(x, _mm512_set1_epi32(1)) != 0; }

  static F ToFloat(I x) { return _mm512_cvtepi32_ps(x); }

  static F Join(const uint16_t* copy, const SplitRest& rest, int64_t i) {
    uint16_t up;
    __builtin_memcpy(&up, rest.up + i / 8, sizeof(up));
    const __m512i rounded = _mm512_cvtepu16_epi32(Load16(copy)), low = _mm512_cvtepu16_epi32(Load16(rest.low + i));
    const __m512i high = _mm512_mask_sub_epi32(rounded, up, rounded, _mm512_set1_epi32(1));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(high, 16), low));
  }

  static void StoreRest(F x, __m256i rounded, const SplitRest& rest, int64_t i) {
    const __m512i bits = _mm512_castps_si512(x);
    const uint16_t up = _mm512_cmpneq_epi32_mask(_mm512_cvtepu16_epi32(rounded), _mm512_srli_epi32(bits, 16));
    Store16(_mm512_cvtepi32_epi16(bits), rest.low + i);
    __builtin_memcpy(rest.up + i / 8, &up, sizeof(up));
  }

  static void StoreFloat16(F x, uint16_t* to) { Store16(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), to); }

  static F Add(F x, F y) { return _mm512_add_ps(x, y); }
  static F Mul(F x, F y) { return _mm512_mul_ps(x, y); }
  static F Div(F x, F y) { return _mm512_div_ps(x, y); }
  static F Sqrt(F x) { return _mm512_sqrt_ps(x); }

  // Returns zeros and NaN unchanged.
  static F Sign(F x) {
    const F zero = _mm512_setzero_ps();
    const F negative = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), x, _mm512_set1_ps(-1));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), negative, _mm512_set1_ps(1));
  }
};

#include "cpu/host_step_kernel.inc"

}  // namespace avx512

void StepAvx512(const HostStep& step, const StepPart& part) { avx512::RunStep(step, part); }

JAXFERRY_END_TARGET

JAXFERRY_BEGIN_TARGET("avx512f,avx512bw,avx512bf16,f16c")

namespace avx512_bf16 {

struct Vector : avx512::Vector {
  // The instruction always flushes subnormal numbers to zero, but a step never stores one.
  static __m256i ToBfloat16(F x) { return (__m256i)_mm512_cvtneps_pbh(x); }
};

#include "cpu/host_step_kernel.inc"

}  // namespace avx512_bf16

void StepAvx512Bf16(const HostStep& step, const StepPart& part) { avx512_bf16::RunStep(step, part); }

JAXFERRY_END_TARGET

}  // namespace jaxferry

#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#endif  // JAXFERRY_HAS_AVX
