// RAII owners of CUDA resources; each resource has exactly one.
#ifndef JAXFERRY_CUDA_OWNERS_H_
#define JAXFERRY_CUDA_OWNERS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/errors.h"

namespace jaxferry::cuda {

// A stream that does not wait for the default stream.
class Stream {
 public:
  // Has the highest priority, so that its few blocks start before the many of a concurrent product.
  Stream() {
    int least = 0;
    int greatest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for the priorities of streams");
    Check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "making a stream");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned flags) { Check(cudaEventCreateWithFlags(&event_, flags), "making an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void Record(cudaStream_t stream) { Check(cudaEventRecord(event_, stream), "recording an event"); }
  // Makes later work on the stream wait for the last recorded event.
  void Hold(cudaStream_t stream) const { Check(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event"); }
  bool HasRun() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    Check(status, "asking for an event");
    return true;
  }
  void Synchronize() const { Check(cudaEventSynchronize(event_), "waiting for an event"); }
  // Returns the time from this event to a later one; both must have run and support timing.
  double SecondsTo(const Event& later) const {
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, event_, later.event_), "asking for the time between events");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// A pool of events. An event may be recorded again while streams still wait for its previous record.
class EventPool {
 public:
  struct Return {
    EventPool* pool;
    void operator()(Event* event) const { pool->TakeBack(event); }
  };
  using Lease = std::unique_ptr<Event, Return>;

  // The flags are those of cudaEventCreateWithFlags.
  explicit EventPool(unsigned flags) : flags_(flags) {}

  Lease Lend() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      free_.reserve(++num_events_);  // so that returning an event cannot fail
      return Lease(new Event(flags_), Return{this});
    }
    std::unique_ptr<Event> event = std::move(free_.back());
    free_.pop_back();
    return Lease(event.release(), Return{this});
  }

 private:
  void TakeBack(Event* event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.emplace_back(event);
  }

  const unsigned flags_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_;
  size_t num_events_ = 0;
};

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) { Check(cudaMalloc(&data_, bytes), "allocating device memory"); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Makes a device the thread's current one during its lifetime.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    Check(cudaGetDevice(&previous_), "asking for the current device");
    if (previous_ == ordinal) return;
    Check(cudaSetDevice(ordinal), "setting the current device");
    is_changed_ = true;
  }
  ~CurrentDevice() {
    if (is_changed_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  bool is_changed_ = false;
};

// If something fails after copies are queued but before later work is ordered behind them, waits for the copies, so
// that their buffers can be freed.
class DrainOnFailure {
 public:
  explicit DrainOnFailure(cudaStream_t stream) : stream_(stream) {}
  ~DrainOnFailure() {
    if (!is_done_) cudaStreamSynchronize(stream_);
  }
  DrainOnFailure(const DrainOnFailure&) = delete;
  DrainOnFailure& operator=(const DrainOnFailure&) = delete;

  void Done() { is_done_ = true; }

 private:
  cudaStream_t stream_;
  bool is_done_ = false;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_OWNERS_H_
