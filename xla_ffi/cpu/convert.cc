#include "cpu/convert.h"

#include <algorithm>
#include <cstring>

// The loops below are vectorised by the compiler; it makes one of each for every vector length, and the loader takes
// the machine's. Sanitizers start too late for that choice.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define JAXFERRY_FOR_EACH_VECTOR_LENGTH __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define JAXFERRY_FOR_EACH_VECTOR_LENGTH
#endif

namespace jaxferry {

namespace {

// Numbers that fit into the first cache at every step of a conversion.
constexpr int64_t kBlock = 2048;

uint32_t BitsOf(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
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
  // A subnormal is its mantissa behind a leading one that is then taken off: no subnormal float appears, for XLA's
  // threads take those for zero.
  const uint32_t subnormal = BitsOf(FromBits(magnitude + (113u << 23)) - FromBits(113u << 23));
  const uint32_t special = magnitude + (224u << 23);
  const uint32_t bits = exponent == 0 ? subnormal : exponent == 0x0f800000 ? special : normal;
  return FromBits(bits | sign);
}

inline uint16_t ToFloat16(float number) {
  const uint32_t sign = (BitsOf(number) & 0x80000000) >> 16;
  const uint32_t bits = BitsOf(number) & 0x7fffffff;
  const uint32_t normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  // Below 2^-14 the addition itself rounds to the last bit that a subnormal half has.
  const uint32_t subnormal = BitsOf(FromBits(bits) + 0.5f) - BitsOf(0.5f);
  const uint32_t special = bits > 0x7f800000 ? 0x7e00 | ((bits >> 13) & 0x1ff) : 0x7c00;
  const uint32_t half = bits >= 0x47800000 ? special : bits < 0x38800000 ? subnormal : normal;
  return static_cast<uint16_t>(half | sign);
}

JAXFERRY_FOR_EACH_VECTOR_LENGTH
void Bfloat16ToFloat32(const uint16_t* source, float* destination, int64_t size) {
  for (int64_t i = 0; i < size; ++i) destination[i] = FromBfloat16(source[i]);
}

JAXFERRY_FOR_EACH_VECTOR_LENGTH
void Float16ToFloat32(const uint16_t* source, float* destination, int64_t size) {
  for (int64_t i = 0; i < size; ++i) destination[i] = FromFloat16(source[i]);
}

JAXFERRY_FOR_EACH_VECTOR_LENGTH
void Float32ToBfloat16(const float* source, uint16_t* destination, int64_t size) {
  for (int64_t i = 0; i < size; ++i) destination[i] = ToBfloat16(source[i]);
}

JAXFERRY_FOR_EACH_VECTOR_LENGTH
void Float32ToFloat16(const float* source, uint16_t* destination, int64_t size) {
  for (int64_t i = 0; i < size; ++i) destination[i] = ToFloat16(source[i]);
}

JAXFERRY_FOR_EACH_VECTOR_LENGTH
void AddFloat32(const float* source, float* destination, int64_t size) {
  for (int64_t i = 0; i < size; ++i) destination[i] += source[i];
}

// Calls `body(start, size)` for blocks of [0, size).
template <typename Body>
void ForEachBlock(int64_t size, Body&& body) {
  for (int64_t start = 0; start < size; start += kBlock) body(start, std::min(kBlock, size - start));
}

}  // namespace

void ToFloat32(Dtype dtype, const void* source, float* destination, int64_t size) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return Bfloat16ToFloat32(static_cast<const uint16_t*>(source), destination, size);
    case Dtype::kFloat16:
      return Float16ToFloat32(static_cast<const uint16_t*>(source), destination, size);
    case Dtype::kFloat32:
      if (size > 0) std::memcpy(destination, source, size * sizeof(float));
  }
}

void FromFloat32(Dtype dtype, const float* source, void* destination, int64_t size) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return Float32ToBfloat16(source, static_cast<uint16_t*>(destination), size);
    case Dtype::kFloat16:
      return Float32ToFloat16(source, static_cast<uint16_t*>(destination), size);
    case Dtype::kFloat32:
      if (size > 0) std::memcpy(destination, source, size * sizeof(float));
  }
}

void RoundThrough(Dtype dtype, float* numbers, int64_t size) {
  if (dtype == Dtype::kFloat32) return;
  uint16_t rounded[kBlock];
  ForEachBlock(size, [&](int64_t start, int64_t block) {
    FromFloat32(dtype, numbers + start, rounded, block);
    ToFloat32(dtype, rounded, numbers + start, block);
  });
}

void ToFloat32Through(Dtype dtype, Dtype through, const void* source, float* destination, int64_t size) {
  ForEachBlock(size, [&](int64_t start, int64_t block) {
    ToFloat32(dtype, Skip(dtype, source, start), destination + start, block);
    if (dtype != through) RoundThrough(through, destination + start, block);
  });
}

void Cast(Dtype from, const void* source, Dtype to, void* destination, int64_t size) {
  if (from == to) {
    if (size > 0) std::memcpy(destination, source, size * ItemSize(to));
    return;
  }
  float numbers[kBlock];
  ForEachBlock(size, [&](int64_t start, int64_t block) {
    ToFloat32(from, Skip(from, source, start), numbers, block);
    FromFloat32(to, numbers, Skip(to, destination, start), block);
  });
}

void Add(Dtype from, const void* source, Dtype to, void* destination, int64_t size) {
  float numbers[kBlock], sums[kBlock];
  ForEachBlock(size, [&](int64_t start, int64_t block) {
    void* place = Skip(to, destination, start);
    ToFloat32(from, Skip(from, source, start), numbers, block);
    ToFloat32(to, place, sums, block);
    AddFloat32(numbers, sums, block);
    FromFloat32(to, sums, place, block);
  });
}

}  // namespace jaxferry
