// Streams and events that order no more than CUDA's would.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

struct Work {
  std::function<void()> run;
  // What must have happened before; empty for nothing.
  std::shared_ptr<const bool> after;
};

struct EmulatedStream {
  std::deque<Work> queue;
};

struct Record {
  bool has_run = false;
  double device_s = 0;
};

struct EmulatedEvent {
  bool is_timed;
  // The last one; a wait keeps the one that was the last when it was asked for. Null before there is any.
  std::shared_ptr<Record> record;
};

namespace {

std::vector<EmulatedStream*> streams;
// The number of one that seldom runs while another can.
size_t slow = 0;
std::mt19937 random_numbers(0);
// How many calls succeed before one fails; none does where it is negative.
long calls_to_failure = -1;
std::mutex calls;
long num_events = 0;
std::map<const void*, int> places;

// Neither zero nor speed of the device's clock are those of the host's.
double DeviceSeconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return 1234.5 + 1.00001 * std::chrono::duration<double>(now).count();
}

[[noreturn]] void Die(const char* message) {
  std::fprintf(stderr, "emulation: %s\n", message);
  std::abort();
}

// Runs the head of a stream that can go on, any one. False where none can.
bool Step() {
  std::vector<EmulatedStream*> ready;
  for (size_t i = 1; i <= streams.size(); ++i) {
    EmulatedStream* stream = streams[(slow + i) % streams.size()];
    if (stream->queue.empty()) continue;
    const bool is_slow = !ready.empty() && stream == streams[slow % streams.size()] && random_numbers() % 8 != 0;
    if (is_slow) continue;
    const Work& head = stream->queue.front();
    if (head.after == nullptr || *head.after) ready.push_back(stream);
  }
  if (ready.empty()) return false;
  EmulatedStream* stream = ready[random_numbers() % ready.size()];
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (work.run) work.run();
  return true;
}

void Drain(EmulatedStream* stream) {
  while (!stream->queue.empty()) {
    if (!Step()) Die("streams wait for each other");
  }
}

void Push(EmulatedStream* stream, Work work) {
  stream->queue.push_back(std::move(work));
  // Sometimes the device is fast.
  for (int steps = random_numbers() % 4; steps > 1; --steps) Step();
}

}  // namespace

namespace emulation {

bool Fails() { return calls_to_failure >= 0 && calls_to_failure-- == 0; }

void Enqueue(cudaStream_t stream, std::function<void()> work) { Push(stream, {std::move(work), nullptr}); }

void EnqueueLast(cudaStream_t stream, std::function<void()> work) {
  stream->queue.push_back({std::move(work), nullptr});
}

cudaStream_t ProgramStream() {
  static cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, 0);
    return made;
  }();
  return stream;
}

std::unique_lock<std::mutex> Lock() { return std::unique_lock<std::mutex>(calls); }

void DrainProgram() { Drain(ProgramStream()); }

}  // namespace emulation

extern "C" __attribute__((visibility("default"))) void emulation_seed(unsigned seed) {
  random_numbers.seed(seed);
  slow = seed;
}

// The call after `num_calls` ones fails. Returns how many were left of the former number.
extern "C" __attribute__((visibility("default"))) long emulation_fail(long num_calls) {
  const auto lock = emulation::Lock();
  return std::exchange(calls_to_failure, num_calls);
}

extern "C" __attribute__((visibility("default"))) long emulation_num_queued() {
  const auto lock = emulation::Lock();
  long count = 0;
  for (const EmulatedStream* stream : streams) count += static_cast<long>(stream->queue.size());
  return count;
}

extern "C" __attribute__((visibility("default"))) long emulation_num_events() {
  const auto lock = emulation::Lock();
  return num_events;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorNotReady ? "not ready" : "invalid value"; }

cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}

// Where the data at an address lie, from now on: a cudaMemoryType, or -1 for pinned memory that the device reaches by
// another address only. Memory that nobody has placed is reached by all, as managed memory is.
extern "C" __attribute__((visibility("default"))) void emulation_place(const void* data, int type) {
  const auto lock = emulation::Lock();
  places[data] = type;
}
extern "C" __attribute__((visibility("default"))) void emulation_forget_places() {
  const auto lock = emulation::Lock();
  places.clear();
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const auto found = places.find(data);
  const int type = found == places.end() ? cudaMemoryTypeManaged : found->second;
  void* address = const_cast<void*>(data);
  const auto memory = static_cast<cudaMemoryType>(type < 0 ? cudaMemoryTypeHost : type);
  *attributes = {memory, 0, type < 0 ? nullptr : address, address};
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 132;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new EmulatedStream;
  streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Drain(stream);
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Drain(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (emulation::Fails()) return cudaErrorInvalidValue;
  if (event->record != nullptr) Push(stream, {nullptr, {event->record, &event->record->has_run}});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (emulation::Fails()) return cudaErrorInvalidValue;
  *event = new EmulatedEvent{(flags & cudaEventDisableTiming) == 0};
  ++num_events;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  --num_events;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (emulation::Fails()) return cudaErrorInvalidValue;
  auto record = std::make_shared<Record>();
  event->record = record;
  Push(stream, {[record] { *record = {true, DeviceSeconds()}; }, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->record == nullptr || event->record->has_run ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (cudaEventQuery(event) != cudaSuccess) {
    if (!Step()) Die("an event waits for what never runs");
  }
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->is_timed || !end->is_timed || !start->record || !end->record) return cudaErrorInvalidResourceHandle;
  if (!start->record->has_run || !end->record->has_run) return cudaErrorNotReady;
  const double seconds = end->record->device_s - start->record->device_s;
  // What a real device gives for the wrong order is nobody's contract.
  if (seconds < 0) return cudaErrorInvalidValue;
  *milliseconds = static_cast<float>(seconds * 1e3);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (emulation::Fails()) return cudaErrorInvalidValue;
  emulation::Enqueue(stream, [=] { std::memcpy(destination, source, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (emulation::Fails() || width > destination_pitch || width > source_pitch) return cudaErrorInvalidValue;
  emulation::Enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(destination) + row * destination_pitch,
                  static_cast<const char*>(source) + row * source_pitch, width);
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (emulation::Fails()) return cudaErrorInvalidValue;
  emulation::Enqueue(stream, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* data, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  if (emulation::Fails() || width > pitch) return cudaErrorInvalidValue;
  emulation::Enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(data) + row * pitch, value, width);
  });
  return cudaSuccess;
}
