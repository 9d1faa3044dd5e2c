// The step with AVX2, eight numbers at once; F16C converts halves.
#include "cpu/bits.h"
#include "cpu/host_step_kernels.h"

#ifdef JAXFERRY_HAS_AVX

#include <immintrin.h>

namespace jaxferry {

JAXFERRY_BEGIN_TARGET("avx2,f16c")

namespace avx2 {

struct Vector {
  using F = __m256;
  using I = __m256i;
  static constexpr int64_t kLanes = 8;

  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(F x, float* to) { _mm256_storeu_ps(to, x); }

  static __m128i Load16(const uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static void Store16(__m128i x, uint16_t* to) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }

  static F LoadBfloat16(const uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load16(from)), 16));
  }

  static F LoadFloat16(const uint16_t* from) { return _mm256_cvtph_ps(Load16(from)); }

  static __m128i ToBfloat16(F x) {
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, nan, is_nan);
    return Narrow(chosen);
  }

  static F Join(const uint16_t* copy, const SplitRest& rest, int64_t i) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(rest.up[i / 8]), bits);
    // Minus one where the copy was rounded up.
    const __m256i up = _mm256_cmpeq_epi32(chosen, bits);
    const __m256i high = _mm256_add_epi32(_mm256_cvtepu16_epi32(Load16(copy)), up);
    const __m256i low = _mm256_cvtepu16_epi32(Load16(rest.low + i));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(high, 16), low));
  }

  static void StoreRest(F x, __m128i rounded, const SplitRest& rest, int64_t i) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i is_cut = _mm256_cmpeq_epi32(_mm256_cvtepu16_epi32(rounded), _mm256_srli_epi32(bits, 16));
    Store16(Narrow(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff))), rest.low + i);
    rest.up[i / 8] = static_cast<uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(is_cut)));
  }

  // Of numbers below 2^16.
  static __m128i Narrow(__m256i x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }

  static I LoadCodes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }

  static void StoreCodes(I x, uint8_t* to) {
    const __m128i halves = Narrow(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }

  static bool AnyBelowOne(I x) { return _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_set1_epi32(1), x)) != 0; }

  static F ToFloat(I x) { return _mm256_cvtepi32_ps(x); }

  static void StoreFloat16(F x, uint16_t* to) { Store16(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), to); }

  static F Add(F x, F y) { return _mm256_add_ps(x, y); }
  static F Mul(F x, F y) { return _mm256_mul_ps(x, y); }
  static F Div(F x, F y) { return _mm256_div_ps(x, y); }
  static F Sqrt(F x) { return _mm256_sqrt_ps(x); }

  // Returns zeros and NaN unchanged.
  static F Sign(F x) {
    const F zero = _mm256_setzero_ps();
    const F negative = _mm256_blendv_ps(x, _mm256_set1_ps(-1), _mm256_cmp_ps(x, zero, _CMP_LT_OQ));
    return _mm256_blendv_ps(negative, _mm256_set1_ps(1), _mm256_cmp_ps(x, zero, _CMP_GT_OQ));
  }
};

#include "cpu/host_step_kernel.inc"

}  // namespace avx2

void StepAvx2(const HostStep& step, const StepPart& part) { avx2::RunStep(step, part); }

JAXFERRY_END_TARGET

}  // namespace jaxferry

#endif  // JAXFERRY_HAS_AVX
