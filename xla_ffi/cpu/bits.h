// Bitwise conversions of single numbers: to nearest, ties to even; NaN stays NaN. No intermediate float is subnormal,
// so results do not depend on a thread's flush-to-zero mode, which XLA's threads use. No XLA types.
#ifndef JAXFERRY_CPU_BITS_H_
#define JAXFERRY_CPU_BITS_H_

#include <cstdint>
#include <cstring>

namespace jaxferry {

inline uint32_t BitsOf(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

inline float FromBfloat16(uint16_t number) { return FromBits(static_cast<uint32_t>(number) << 16); }

inline uint16_t ToBfloat16(float number) {
  const uint32_t bits = BitsOf(number);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline float FromFloat16(uint16_t number) {
  const uint32_t sign = static_cast<uint32_t>(number & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(number & 0x7fff) << 13;
  const uint32_t exponent = magnitude & 0x0f800000;
  const uint32_t normal = magnitude + (112u << 23);
  // Builds a subnormal as its mantissa with a leading one, then subtracts that one.
  const uint32_t subnormal = BitsOf(FromBits(magnitude + (113u << 23)) - FromBits(113u << 23));
  const uint32_t special = magnitude + (224u << 23);
  const uint32_t bits = exponent == 0 ? subnormal : exponent == 0x0f800000 ? special : normal;
  return FromBits(bits | sign);
}

inline uint16_t ToFloat16(float number) {
  const uint32_t sign = (BitsOf(number) & 0x80000000) >> 16;
  const uint32_t bits = BitsOf(number) & 0x7fffffff;
  const uint32_t normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  // Below 2^-14, the addition rounds to the last bit of a subnormal half.
  const uint32_t subnormal = BitsOf(FromBits(bits) + 0.5f) - BitsOf(0.5f);
  const uint32_t special = bits > 0x7f800000 ? 0x7e00 | ((bits >> 13) & 0x1ff) : 0x7c00;
  const uint32_t half = bits >= 0x47800000 ? special : bits < 0x38800000 ? subnormal : normal;
  return static_cast<uint16_t>(half | sign);
}

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_BITS_H_
