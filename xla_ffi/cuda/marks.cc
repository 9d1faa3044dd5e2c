#include "cuda/marks.h"

#include <chrono>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "cuda/device.h"

namespace jaxferry::cuda {

namespace {

// A reading of both clocks within this time is exact enough; a slower one was delayed and is repeated.
constexpr double kGoodReadingSeconds = 2e-5;
constexpr int kMostReadings = 8;

double HostSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

DeviceMarks::Now ReadClocksOf(int ordinal) {
  Device& device = Device::Get(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  return device.marks.ReadClocks();
}

}  // namespace

MarkLists<Span>& TheMarks() {
  static auto* marks = new MarkLists<Span>;
  return *marks;
}

SharedEvent DeviceMarks::Record(cudaStream_t stream) {
  EventPool::Lease event = events_.Lend();
  event->Record(stream);
  return event;
}

void DeviceMarks::NoteWait(cudaStream_t stream) {
  if (!TheMarks().IsAnyOpen()) return;
  last_ = Record(stream);
  programs_ = stream;
}

void DeviceMarks::NoteStart(MarkQueue queue, cudaStream_t stream) {
  SharedEvent& start = CopiedBy(queue).start;
  if (start == nullptr && TheMarks().IsAnyOpen()) start = Record(stream);
}

void DeviceMarks::NoteEnd(MarkQueue queue, cudaStream_t stream) {
  if (TheMarks().IsAnyOpen()) CopiedBy(queue).end = Record(stream);
}

void DeviceMarks::AddProgram(int ordinal, const void* token, cudaStream_t stream) {
  SharedEvent end = Record(stream);
  // Events of another stream do not tell when this one was free.
  SharedEvent start = stream == programs_ ? std::move(last_) : nullptr;
  last_ = end;
  programs_ = stream;
  TheMarks().Add(token, {ordinal, std::move(start), std::move(end)});
}

void DeviceMarks::AddCopies(int ordinal, const void* token, MarkQueue queue) {
  Copied copied = std::exchange(CopiedBy(queue), {});
  TheMarks().Add(token, {ordinal, std::move(copied.start), std::move(copied.end)});
}

DeviceMarks::Now DeviceMarks::ReadClocks() {
  if (!clock_) clock_.emplace();
  Now best{nullptr, 0};
  double least_s = 0;
  for (int reading = 0; reading < kMostReadings; ++reading) {
    const double before_s = HostSeconds();
    SharedEvent event = Record(clock_->get());
    event->Synchronize();
    const double after_s = HostSeconds();
    if (best.event == nullptr || after_s - before_s < least_s) {
      least_s = after_s - before_s;
      best = {std::move(event), (before_s + after_s) / 2};
    }
    if (least_s <= kGoodReadingSeconds) break;
  }
  return best;
}

void RunMark(Device& device, int ordinal, const void* token, MarkQueue queue, cudaStream_t stream) {
  if (queue == MarkQueue::kProgram) return device.marks.AddProgram(ordinal, token, stream);
  device.marks.AddCopies(ordinal, token, queue);
}

void ReadMarks(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s, double* ends_s) {
  std::vector<std::optional<Span>> spans(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    std::optional<Span> span = TheMarks().Find(tokens[i], numbers[i]);
    if (!span) continue;
    const CurrentDevice current(span->ordinal);
    if (span->end != nullptr && span->end->HasRun()) spans[static_cast<size_t>(i)] = std::move(span);
  }
  // Read after all these events have run, and so later than any of them.
  std::map<int, DeviceMarks::Now> clocks;
  for (int64_t i = 0; i < count; ++i) {
    starts_s[i] = ends_s[i] = NAN;
    const std::optional<Span>& span = spans[static_cast<size_t>(i)];
    if (!span) continue;
    const CurrentDevice current(span->ordinal);
    auto now = clocks.find(span->ordinal);
    if (now == clocks.end()) now = clocks.emplace(span->ordinal, ReadClocksOf(span->ordinal)).first;
    const auto& [event, host_s] = now->second;
    ends_s[i] = host_s - span->end->SecondsTo(*event);
    if (span->start != nullptr) starts_s[i] = host_s - span->start->SecondsTo(*event);
  }
}

}  // namespace jaxferry::cuda
