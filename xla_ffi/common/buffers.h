// The building blocks of the operations' argument checks.
#ifndef JAXFERRY_COMMON_BUFFERS_H_
#define JAXFERRY_COMMON_BUFFERS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "common/checks.h"
#include "common/dtypes.h"

namespace jaxferry {

std::optional<Dtype> FindDtype(const ffi::AnyBuffer& buffer);

ffi::Error CheckFloating(const char* operation, const char* name, const ffi::AnyBuffer& buffer, Dtype* dtype);

ffi::Error CheckFlag(const char* operation, const char* name, int64_t value, bool* flag);

ffi::Error CheckSameDtype(const char* operation, const char* name, const ffi::AnyBuffer& buffer, const char* other_name,
                          const ffi::AnyBuffer& other);

// Checks that a buffer is [.., columns]; stores the product of its other dimensions in `rows`.
ffi::Error CheckMatrix(const char* operation, const char* name, const ffi::AnyBuffer& buffer, const char* columns_name,
                       int64_t columns, int64_t* rows);

// Checks that `rows * columns` elements starting at `offset` lie inside the vector.
ffi::Error CheckInside(const char* operation, const char* name, const ffi::AnyBuffer& vector, int64_t offset,
                       int64_t rows, int64_t columns);

ffi::Error CheckAliased(const char* operation, const char* name, const ffi::AnyBuffer& argument,
                        const ffi::AnyBuffer& result);

void* At(const ffi::AnyBuffer& vector, int64_t offset);

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_BUFFERS_H_
