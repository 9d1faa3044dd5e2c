// When programs and copies start and end, by events on their streams. Nobody waits for those until somebody asks.
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

// An event goes back to its pool with the last mark that it bounds.
using SharedEvent = std::shared_ptr<const Event>;

struct Span {
  int ordinal;
  SharedEvent start;  // null where nothing is known of what came before
  SharedEvent end;    // null where there was nothing to mark
};

// The marks of all devices: addresses of tokens differ between them.
MarkLists<Span>& TheMarks();

// Of one device; whoever calls holds its lock. Nothing is recorded while no token's list is open.
class DeviceMarks {
 public:
  // The stream was made to wait: what it is given from now on starts after that.
  void NoteWait(cudaStream_t stream);
  // A queue of copies is about to be given some, or has been; whoever is told of their end must be told after this.
  void NoteStart(MarkQueue queue, cudaStream_t stream);
  void NoteEnd(MarkQueue queue, cudaStream_t stream);
  // Marks what the stream has run so far.
  void AddProgram(int ordinal, const void* token, cudaStream_t stream);
  // Marks what the queue was given since its last mark.
  void AddCopies(int ordinal, const void* token, MarkQueue queue);

  // A moment by both clocks.
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
  // The last event on the stream that programs run on, and which that is.
  SharedEvent last_;
  cudaStream_t programs_ = nullptr;
  // Of the copies since the last mark, loads and stores.
  Copied copied_[2];
  // Of its own, so that nothing that is under way holds it up.
  std::optional<Stream> clock_;
};

void RunMark(Device& device, int ordinal, const void* token, MarkQueue queue, cudaStream_t stream);

// The times of marks that have ended, in seconds of the host's clock (std::chrono::steady_clock); NaN for the others.
void ReadMarks(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s, double* ends_s);

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_MARKS_H_
