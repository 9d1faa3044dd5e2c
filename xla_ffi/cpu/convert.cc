#include "cpu/convert.h"

#include <algorithm>
#include <cstring>

#include "cpu/bits.h"

// The compiler vectorises the loops below, once for each vector length; the loader chooses the machine's. Sanitizers
// start too late for that choice.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define JAXFERRY_FOR_EACH_VECTOR_LENGTH __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define JAXFERRY_FOR_EACH_VECTOR_LENGTH
#endif

namespace jaxferry {

namespace {

// A block of this many numbers fits into the L1 cache at every step of a conversion.
constexpr int64_t kBlock = 2048;

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
    if (to == Dtype::kFloat32) return AddFloat32(numbers, static_cast<float*>(place), block);
    ToFloat32(to, place, sums, block);
    AddFloat32(numbers, sums, block);
    FromFloat32(to, sums, place, block);
  });
}

}  // namespace jaxferry
