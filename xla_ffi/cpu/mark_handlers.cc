// The handler that marks start and end of a program or of a queue's last work, and the functions that read the times.
#include <cmath>
#include <memory>
#include <utility>

#include "common/checks.h"
#include "common/exports.h"
#include "cpu/ferry.h"
#include "cpu/marks.h"

namespace jaxferry {

static ffi::Error Mark(ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer>, int64_t queue) {
  return Guarded("mark", [&] {
    const void* token = nullptr;
    MarkQueue which;
    JAXFERRY_RETURN_IF_ERROR(CheckMark(arguments, queue, &token, &which));
    if (which == MarkQueue::kProgram) {
      Marks::Get().AddProgram(token);
      return ffi::Error::Success();
    }
    auto times = std::make_shared<Times>();
    Marks::Get().lists.Add(token, times);
    Ferry::Get().queue(which == MarkQueue::kLoads ? kLoad : kStore).Mark(std::move(times));
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_mark, Mark,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()        // token, then the arrays that it follows
                                  .Ret<ffi::AnyBuffer>()  // a dummy
                                  .Attr<int64_t>("queue"));

}  // namespace jaxferry

void jaxferry_marks_open(const void* token, int64_t capacity) { jaxferry::Marks::Get().lists.Open(token, capacity); }

void jaxferry_marks_close(const void* token) { jaxferry::Marks::Get().lists.Close(token); }

void jaxferry_marks_read(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s,
                         double* ends_s) {
  for (int64_t i = 0; i < count; ++i) {
    const auto times = jaxferry::Marks::Get().lists.Find(tokens[i], numbers[i]);
    starts_s[i] = times ? (*times)->start_s.load() : NAN;
    ends_s[i] = times ? (*times)->end_s.load() : NAN;
  }
}
