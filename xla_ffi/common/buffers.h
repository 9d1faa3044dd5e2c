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

// Checks that the size of the buffer's elements is known.
ffi::Error CheckKnown(const char* operation, const char* name, const ffi::AnyBuffer& buffer);

// Checks that `rows * columns` elements starting at `offset` lie inside the vector, and that the first one is at the
// start of a byte.
ffi::Error CheckInside(const char* operation, const char* name, const ffi::AnyBuffer& vector, int64_t offset,
                       int64_t rows, int64_t columns);

// Checks that the result is the argument's own memory.
ffi::Error CheckAliased(const char* operation, const char* name, const ffi::AnyBuffer& argument,
                        const ffi::AnyBuffer& result);

// The bytes of a buffer, in which XLA packs elements of fewer than 8 bits.
int64_t NumBytes(const ffi::AnyBuffer& buffer);

// The address of an element that CheckInside has accepted.
void* At(const ffi::AnyBuffer& vector, int64_t offset);

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_BUFFERS_H_
