// Start and end of programs and copies, by events on their streams. Nothing waits for the events before they are read.
#ifndef JAXFERRY_CUDA_MARKS_H_
#define JAXFERRY_CUDA_MARKS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "common/mark_lists.h"
#include "cuda/owners.h"

namespace jaxferry::cuda {

class Device;

// An event returns to its pool with the last mark that uses it.
using SharedEvent = std::shared_ptr<const Event>;

struct Span {
  int ordinal;
  SharedEvent start;  // null if the preceding work is unknown
  SharedEvent end;    // null if there was nothing to mark
};

// The marks of all devices, whose tokens have different addresses.
MarkLists<Span>& TheMarks();

// The marks of one device; callers hold its lock. Nothing is recorded while no token's list is open.
class DeviceMarks {
 public:
  // Notes that the stream was made to wait: later work starts after that.
  void NoteWait(cudaStream_t stream);
  // Note that copies are about to be queued, or have been; events for their end must be recorded after this.
  void NoteStart(MarkQueue queue, cudaStream_t stream);
  void NoteEnd(MarkQueue queue, cudaStream_t stream);
  // Marks the stream's work so far.
  void AddProgram(int ordinal, const void* token, cudaStream_t stream);
  // Marks the copies queued since the queue's last mark.
  void AddCopies(int ordinal, const void* token, MarkQueue queue);

  // One instant on both clocks.
  struct Now {
    SharedEvent event;
    double host_s;
  };
  Now ReadClocks();

 private:
  struct Copied {
    SharedEvent start, end;
  };

  SharedEvent Record(cudaStream_t stream);
  Copied& CopiedBy(MarkQueue queue) { return copied_[queue == MarkQueue::kStores]; }

  EventPool events_{cudaEventDefault};
  // The last event on the programs' stream, and that stream.
  SharedEvent last_;
  cudaStream_t programs_ = nullptr;
  // The copies since the last mark: loads and stores.
  Copied copied_[2];
  // A separate stream, so that no work in flight delays it.
  std::optional<Stream> clock_;
};

void RunMark(Device& device, int ordinal, const void* token, MarkQueue queue, cudaStream_t stream);

// Reads the times of ended marks in seconds of the host's clock (std::chrono::steady_clock); NaN for the others.
void ReadMarks(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s, double* ends_s);

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_MARKS_H_
