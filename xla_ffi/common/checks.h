// Turns an operation's XLA arguments into a checked call. Errors are the same on each platform: one line that names the
// operation, the argument, and the shapes.
#ifndef JAXFERRY_COMMON_CHECKS_H_
#define JAXFERRY_COMMON_CHECKS_H_

#include <cstdint>
#include <exception>
#include <string>

#include "common/calls.h"
#include "common/mark_lists.h"
#include "common/sanitizer.h"
#include "xla/ffi/api/ffi.h"

#define JAXFERRY_RETURN_IF_ERROR(expression)                         \
  do {                                                               \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) { \
      return error_;                                                 \
    }                                                                \
  } while (false)

namespace jaxferry {

namespace ffi = xla::ffi;

using Integers = ffi::Span<const int64_t>;

// Returns for example "float32[3,4]", for error messages.
std::string Describe(const ffi::AnyBuffer& buffer);

// Returns an error of an operation: "dha_gather: MESSAGE".
ffi::Error Invalid(const char* operation, const std::string& message);

ffi::Error CheckGather(ffi::AnyBuffer table, ffi::AnyBuffer indices, ffi::AnyBuffer scratch, ffi::AnyBuffer result,
                       int64_t offset, int64_t rows, int64_t columns, Gather* call);

ffi::Error CheckMatmul(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scratch, ffi::AnyBuffer y, int64_t offset,
                       int64_t k, int64_t n, int64_t transpose, Matmul* call);

ffi::Error CheckMatmulGradient(ffi::AnyBuffer destination, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::AnyBuffer scratch,
                               ffi::AnyBuffer result, int64_t offset, int64_t k, int64_t n, int64_t transpose,
                               int64_t accumulate, int64_t round_to, MatmulGradient* call);

ffi::Error CheckRead(ffi::AnyBuffer vector, ffi::RemainingRets results, Integers offsets, Copies* copies);

ffi::Error CheckStore(ffi::AnyBuffer destination, ffi::AnyBuffer gradient, ffi::AnyBuffer result, int64_t offset,
                      int64_t accumulate, Store* call);

ffi::Error CheckRowStore(ffi::AnyBuffer destination, ffi::AnyBuffer indices, ffi::AnyBuffer added,
                         ffi::AnyBuffer result, int64_t offset, int64_t rows, int64_t columns, RowStore* call);

ffi::Error CheckFerryLoad(ffi::RemainingArgs arguments, ffi::RemainingRets results, Integers vectors, Integers offsets,
                          int64_t vacant, Copies* copies, Vacancy* vacancy);

ffi::Error CheckFerryStore(ffi::RemainingArgs arguments, ffi::AnyBuffer result, Integers offsets, int64_t accumulate,
                           Copies* copies);

// Checks that each result is the memory of the argument of the same number, and stores where these lie.
ffi::Error CheckInPlace(const char* operation, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        Ranges* ranges);

ffi::Error CheckMark(ffi::RemainingArgs arguments, int64_t queue, const void** token, MarkQueue* which);

// Runs a handler's body; turns its exceptions (no memory, no thread) into errors.
template <typename Body>
ffi::Error Guarded(const char* operation, Body&& body) {
  try {
    NoteBegun();
    ffi::Error error = body();
    NoteEnded();
    return error;
  } catch (const std::exception& exception) {
    return ffi::Error::Internal(std::string(operation) + ": " + exception.what());
  }
}

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_CHECKS_H_
