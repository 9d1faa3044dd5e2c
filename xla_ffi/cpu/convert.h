// Conversions between dtypes: to nearest, ties to even; NaN stays NaN. No XLA types.
#ifndef JAXFERRY_CPU_CONVERT_H_
#define JAXFERRY_CPU_CONVERT_H_

#include <cstdint>

#include "common/dtypes.h"

namespace jaxferry {

void ToFloat32(Dtype dtype, const void* source, float* destination, int64_t size);

void FromFloat32(Dtype dtype, const float* source, void* destination, int64_t size);

// Converts numbers to fp32, rounding them through another dtype first.
void ToFloat32Through(Dtype dtype, Dtype through, const void* source, float* destination, int64_t size);

void RoundThrough(Dtype dtype, float* numbers, int64_t size);

void Cast(Dtype from, const void* source, Dtype to, void* destination, int64_t size);

// destination += source, added in fp32 and rounded once.
void Add(Dtype from, const void* source, Dtype to, void* destination, int64_t size);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_CONVERT_H_
