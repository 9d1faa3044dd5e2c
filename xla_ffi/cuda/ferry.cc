// Copies on separate streams, one per direction, FIFO.
#include <optional>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/operations.h"

namespace jaxferry::cuda {

namespace {

void Forget(Device& device) {
  device.ferry.Forget([](const SharedEvent& ended) { return ended->HasRun(); });
}

void Enqueue(const Copy& copy, cudaMemcpyKind kind, cudaStream_t queue) {
  if (copy.bytes == 0) return;
  if (copy.add) {
    const int64_t size = copy.bytes / ItemSize(*copy.add);
    return Convert({*copy.add, *copy.add, copy.source, copy.destination, size, true}, kBlocksOfLink, queue);
  }
  Check(cudaMemcpyAsync(copy.destination, copy.source, copy.bytes, kind, queue), "queueing a copy");
}

// Queues copies that start once these events have run, or the stream's work so far if there are none.
void RunQueue(Device& device, const Copies& copies, cudaMemcpyKind kind, cudaStream_t queue, cudaStream_t stream,
              const std::optional<std::vector<SharedEvent>>& vacated = std::nullopt) {
  const MarkQueue marked = kind == cudaMemcpyHostToDevice ? MarkQueue::kLoads : MarkQueue::kStores;
  Forget(device);
  EventPool::Lease event = device.events.Lend();
  if (vacated) {
    for (const SharedEvent& each : *vacated) each->Hold(queue);
  } else {
    event->Record(stream);
    event->Hold(queue);
  }
  device.marks.NoteStart(marked, queue);
  DrainOnFailure drain(queue);
  for (const Copy& copy : copies) Enqueue(copy, kind, queue);
  device.marks.NoteEnd(marked, queue);
  event->Record(queue);
  device.ferry.Add(copies, std::move(event));
  drain.Done();
}

}  // namespace

void RunFerryLoad(Device& device, const Copies& copies, Vacancy vacancy, cudaStream_t stream) {
  Ranges targets;
  for (const Copy& copy : copies) targets.push_back({copy.destination, copy.bytes});
  // Others may lie where vacant arrays have been freed meanwhile, so what is known of these is forgotten either way.
  std::optional<std::vector<SharedEvent>> vacated = device.vacancies.Take(targets);
  if (vacancy == Vacancy::kUnknown) vacated.reset();
  if (vacancy == Vacancy::kSeen) vacated.emplace();
  RunQueue(device, copies, cudaMemcpyHostToDevice, device.loads.get(), stream, vacated);
}

void RunFerryStore(Device& device, const Copies& copies, cudaStream_t stream) {
  RunQueue(device, copies, cudaMemcpyDeviceToHost, device.stores.get(), stream);
}

void RunFerryWait(Device& device, const Ranges& ranges, cudaStream_t stream) {
  Forget(device);
  device.ferry.ForEachIn(ranges, [&](const SharedEvent& ended) { ended->Hold(stream); });
  device.marks.NoteWait(stream);
}

void RunFerryVacate(Device& device, const Ranges& ranges, cudaStream_t stream) {
  EventPool::Lease event = device.events.Lend();
  event->Record(stream);
  device.vacancies.Add(ranges, std::move(event));
}

void SynchronizeFerry() {
  for (const auto& [ordinal, device] : Device::All()) {
    const CurrentDevice current(ordinal);
    Check(cudaStreamSynchronize(device->loads.get()), "waiting for loads");
    Check(cudaStreamSynchronize(device->stores.get()), "waiting for stores");
  }
}

void AwaitFerry(const Ranges& ranges) {
  for (const auto& [ordinal, device] : Device::All()) {
    const CurrentDevice current(ordinal);
    std::vector<SharedEvent> ends;
    {
      // Unlocked while waiting, so that other threads can queue more.
      std::lock_guard<std::mutex> lock(device->mutex);
      device->ferry.ForEachIn(ranges, [&](const SharedEvent& ended) { ends.push_back(ended); });
    }
    for (const SharedEvent& ended : ends) ended->Synchronize();
  }
}

}  // namespace jaxferry::cuda
