// The CUDA library's handlers for programs on the CPU: each returns when the program's stream would have come past it,
// which is when XLA lets the program go on. Other streams may lag behind; the program's too if a test says so.
#include <cstring>
#include <mutex>

#include "common/exports.h"
#include "cuda/panels.h"

namespace emulation {

std::unique_lock<std::mutex> Lock();
void DrainProgram();

static bool program_lags = false;

static XLA_FFI_Error* Call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_CallFrame* frame) {
  const auto lock = Lock();
  XLA_FFI_Error* error = handler(frame);
  // XLA asks each handler what it is, without results, before it calls it: nothing runs then.
  if (frame->rets.size > 0 && !program_lags) DrainProgram();
  return error;
}

}  // namespace emulation

#define EMULATE(name)                                                                                          \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* emulated_##name(XLA_FFI_CallFrame* frame) { \
    return emulation::Call(jaxferry::jaxferry_##name, frame);                                                  \
  }

EMULATE(scratch)
EMULATE(dha_gather)
EMULATE(dha_matmul)
EMULATE(dha_read)
EMULATE(gradient_store)
EMULATE(dha_matmul_gradient)
EMULATE(row_store)
EMULATE(ferry_load)
EMULATE(ferry_store)
EMULATE(ferry_wait)
EMULATE(ferry_vacate)
EMULATE(mark)

extern "C" __attribute__((visibility("default"))) void emulation_synchronize() {
  const auto lock = emulation::Lock();
  jaxferry_ferry_synchronize();
}

extern "C" __attribute__((visibility("default"))) int emulation_ferry_wait_for(int64_t count, const void* const* data,
                                                                               const int64_t* bytes) {
  const auto lock = emulation::Lock();
  return jaxferry_ferry_wait_for(count, data, bytes);
}

extern "C" __attribute__((visibility("default"))) void emulation_marks_read(int64_t count, const void* const* tokens,
                                                                            const int64_t* numbers, double* starts_s,
                                                                            double* ends_s) {
  const auto lock = emulation::Lock();
  jaxferry_marks_read(count, tokens, numbers, starts_s, ends_s);
}

// Whether the program's stream may lag behind the handlers, as on a GPU. Before a program on the CPU uses what it
// makes, it must be told not to.
extern "C" __attribute__((visibility("default"))) void emulation_lag(int lags) {
  const auto lock = emulation::Lock();
  emulation::program_lags = lags != 0;
}

// Something that the program has yet to do when the next operation is called.
extern "C" __attribute__((visibility("default"))) void emulation_fill_later(void* data, size_t bytes, int value) {
  const auto lock = emulation::Lock();
  emulation::EnqueueLast(emulation::ProgramStream(), [=] { std::memset(data, value, bytes); });
}

extern "C" __attribute__((visibility("default"))) void emulation_cut_into_panels(
    int64_t total_slices, int64_t slice_bytes, int64_t second_slice_bytes, int64_t scratch_bytes, int64_t width,
    int64_t num_multiprocessors, int64_t* panels) {
  const auto cut = jaxferry::cuda::CutIntoPanels(total_slices, slice_bytes, second_slice_bytes, scratch_bytes, width,
                                                 num_multiprocessors);
  panels[0] = cut.num_slices;
  panels[1] = cut.half_bytes;
  panels[2] = cut.second_offset;
  panels[3] = jaxferry::cuda::LeastScratchBytes(slice_bytes, second_slice_bytes);
  panels[4] = cut.padded_slices;
}

extern "C" __attribute__((visibility("default"))) int emulation_is_for_copy_engine(int64_t row_bytes,
                                                                                   int64_t pitch_bytes) {
  return jaxferry::cuda::IsForCopyEngine(row_bytes, pitch_bytes);
}

// A host matrix's rows, copied by the kernel to memory of the destination's pitch.
extern "C" __attribute__((visibility("default"))) void emulation_read_rows(const void* source, void* destination,
                                                                           int64_t num_rows, int64_t row_bytes,
                                                                           int64_t source_pitch,
                                                                           int64_t destination_pitch) {
  const auto lock = emulation::Lock();
  jaxferry::cuda::ReadRows({source, destination, num_rows, row_bytes, source_pitch, destination_pitch},
                           emulation::ProgramStream());
  emulation::DrainProgram();
}

// One of the two kernels of a lookup in a table of 32-bit numbers.
extern "C" __attribute__((visibility("default"))) void emulation_gather(const uint32_t* table, const int32_t* indices,
                                                                        uint32_t* result, const int32_t* first,
                                                                        int64_t num_indices, int64_t rows,
                                                                        int64_t columns, int is_repeated) {
  using namespace jaxferry::cuda;
  const auto lock = emulation::Lock();
  const GatherArguments<uint32_t> arguments = {table, indices, result, first, num_indices, rows, columns, 0};
  Launch("the kernel that gathers rows", is_repeated ? GatherKernel<uint32_t, true> : GatherKernel<uint32_t, false>, 2,
         kGatherThreads, emulation::ProgramStream(), arguments);
  emulation::DrainProgram();
}
