// The handler that marks when a program, or what a queue was given last, starts and ends; and who asks for the times.
#include <cmath>
#include <exception>

#include "cuda/handler.h"
#include "cuda/marks.h"

namespace jaxferry {

static ffi::Error Mark(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer>,
                       int64_t queue) {
  return Guarded("mark", [&] {
    const void* token = nullptr;
    MarkQueue which;
    JAXFERRY_RETURN_IF_ERROR(CheckMark(arguments, queue, &token, &which));
    return cuda::RunOn("mark", ordinal, {},
                       [&](cuda::Device& device) { cuda::RunMark(device, ordinal, token, which, stream); });
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_mark, Mark,
                              JAXFERRY_BIND()
                                  .RemainingArgs()        // token, then what it follows
                                  .Ret<ffi::AnyBuffer>()  // nothing of interest
                                  .Attr<int64_t>("queue"));

}  // namespace jaxferry

void jaxferry_marks_open(const void* token, int64_t capacity) { jaxferry::cuda::TheMarks().Open(token, capacity); }

void jaxferry_marks_close(const void* token) { jaxferry::cuda::TheMarks().Close(token); }

// Where the device has failed, what is not known yet stays NaN: the next operation on it says why.
void jaxferry_marks_read(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s,
                         double* ends_s) {
  for (int64_t i = 0; i < count; ++i) starts_s[i] = ends_s[i] = NAN;
  try {
    jaxferry::cuda::ReadMarks(count, tokens, numbers, starts_s, ends_s);
  } catch (const std::exception&) {
  }
}
