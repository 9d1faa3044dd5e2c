// The step for any machine: four numbers at once, as portable vectors.
#include "cpu/bits.h"
#include "cpu/host_step_kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxferry {

namespace portable {

struct Vector {
  typedef float F __attribute__((vector_size(16)));
  typedef uint32_t I __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
  static constexpr int64_t kLanes = 4;

  static F Set(float x) { return F{x, x, x, x}; }

  static F Load(const float* from) {
    F x;
    __builtin_memcpy(&x, from, sizeof(x));
    return x;
  }

  static void Store(F x, float* to) { __builtin_memcpy(to, &x, sizeof(x)); }

  static F LoadBfloat16(const uint16_t* from) {
    return F{FromBfloat16(from[0]), FromBfloat16(from[1]), FromBfloat16(from[2]), FromBfloat16(from[3])};
  }

  static F LoadFloat16(const uint16_t* from) {
    return F{FromFloat16(from[0]), FromFloat16(from[1]), FromFloat16(from[2]), FromFloat16(from[3])};
  }

  struct Halves {
    uint16_t numbers[4];
  };

  static void Store16(const Halves& x, uint16_t* to) { __builtin_memcpy(to, x.numbers, sizeof(x.numbers)); }

  static Halves ToBfloat16(F x) {
    return {{jaxferry::ToBfloat16(x[0]), jaxferry::ToBfloat16(x[1]), jaxferry::ToBfloat16(x[2]),
             jaxferry::ToBfloat16(x[3])}};
  }

  // Of numbers below 2^16.
  static Halves Narrow(I x) {
    return {{static_cast<uint16_t>(x[0]), static_cast<uint16_t>(x[1]), static_cast<uint16_t>(x[2]),
             static_cast<uint16_t>(x[3])}};
  }

  static I LoadCodes(const uint8_t* from) { return I{from[0], from[1], from[2], from[3]}; }

  static void StoreCodes(I x, uint8_t* to) {
    for (int64_t i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(x[i]);
  }

  static bool AnyBelowOne(I x) {
    const Mask y = (Mask)x;
    return y[0] < 1 || y[1] < 1 || y[2] < 1 || y[3] < 1;
  }

  // Of numbers below 2^31.
  static F ToFloat(I x) { return __builtin_convertvector((Mask)x, F); }

  static F Join(const uint16_t* copy, const SplitRest& rest, int64_t i) {
    const int up = rest.up[i / 8] >> i % 8;
    F x;
    for (int64_t j = 0; j < kLanes; ++j) {
      x[j] = FromBits(static_cast<uint32_t>(copy[j] - (up >> j & 1)) << 16 | rest.low[i + j]);
    }
    return x;
  }

  static void StoreRest(F x, const Halves& rounded, const SplitRest& rest, int64_t i) {
    int up = 0;
    for (int64_t j = 0; j < kLanes; ++j) {
      const uint32_t bits = BitsOf(x[j]);
      rest.low[i + j] = static_cast<uint16_t>(bits);
      up |= (rounded.numbers[j] != bits >> 16) << j;
    }
    uint8_t& byte = rest.up[i / 8];
    byte = static_cast<uint8_t>(i % 8 == 0 ? (byte & 0xf0) | up : (byte & 0x0f) | up << 4);
  }

  static void StoreFloat16(F x, uint16_t* to) {
    for (int64_t i = 0; i < kLanes; ++i) to[i] = ToFloat16(x[i]);
  }

  static F Add(F x, F y) { return x + y; }
  static F Mul(F x, F y) { return x * y; }
  static F Div(F x, F y) { return x / y; }

  static F Sqrt(F x) {
#if defined(__SSE2__)
    return _mm_sqrt_ps(x);
#elif defined(__aarch64__)
    return vsqrtq_f32(x);
#else
    return F{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
#endif
  }

  // Returns zeros and NaN unchanged.
  static F Sign(F x) {
    const Mask is_positive = x > Set(0), is_negative = x < Set(0);
    return is_positive ? Set(1) : is_negative ? Set(-1) : x;
  }
};

#include "cpu/host_step_kernel.inc"

}  // namespace portable

void StepPortable(const HostStep& step, const StepPart& part) { portable::RunStep(step, part); }

}  // namespace jaxferry
