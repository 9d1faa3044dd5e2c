// The handler that marks start and end of a program or of a queue's last work, and the functions that read the times.
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
                                  .RemainingArgs()        // token, then the arrays that it follows
                                  .Ret<ffi::AnyBuffer>()  // a dummy
                                  .Attr<int64_t>("queue"));

}  // namespace jaxferry

void jaxferry_marks_open(const void* token, int64_t capacity) { jaxferry::cuda::TheMarks().Open(token, capacity); }

void jaxferry_marks_close(const void* token) { jaxferry::cuda::TheMarks().Close(token); }

// If the device has failed, unknown times stay NaN; the next operation on it reports the reason.
void jaxferry_marks_read(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s,
                         double* ends_s) {
  for (int64_t i = 0; i < count; ++i) starts_s[i] = ends_s[i] = NAN;
  try {
    jaxferry::cuda::ReadMarks(count, tokens, numbers, starts_s, ends_s);
  } catch (const std::exception&) {
  }
}
