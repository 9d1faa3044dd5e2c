#include "cpu/ferry.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

namespace jaxferry {

namespace {

// Never destroyed: its threads end at exit, but XLA's threads may still call it. A forked child abandons its parent's
// instance, because the parent's threads do not exist in the child and may have held its locks.
std::atomic<Ferry*> instance{nullptr};

// Python has already ended when this runs and may have freed queued buffers.
struct StopAtExit {
  ~StopAtExit() {
    if (Ferry* ferry = instance.load()) ferry->Stop();
  }
} stop_at_exit;

}  // namespace

Ferry& Ferry::Get() {
  static const bool is_made = [] {
    instance.store(new Ferry);
    pthread_atfork(nullptr, nullptr, [] { instance.store(new Ferry); });
    return true;
  }();
  static_cast<void>(is_made);
  return *instance.load();
}

LinkSettings& Ferry::Settings(Direction direction) {
  static LinkSettings* settings = new LinkSettings[3];
  return settings[direction];
}

void Ferry::CallWhenDone(const Ranges& ranges, std::function<void()> callback) {
  // One for each queue that still touches the bytes, and one for this function, so that the callback runs after both
  // queues were checked.
  auto num_left = std::make_shared<std::atomic<int>>(3);
  const auto count_down = [num_left, callback = std::move(callback)] {
    if (num_left->fetch_sub(1) == 1) callback();
  };
  for (FerryQueue& queue : queues_) {
    if (!queue.CallWhenDone(ranges, count_down)) num_left->fetch_sub(1);
  }
  count_down();
}

void Ferry::WaitFor(const Ranges& ranges) {
  for (FerryQueue& queue : queues_) queue.WaitFor(ranges);
}

void Ferry::Synchronize() {
  for (FerryQueue& queue : queues_) queue.Synchronize();
}

void Ferry::Stop() {
  for (FerryQueue& queue : queues_) queue.Stop();
  callbacks_.Stop(std::chrono::seconds(2));
}

}  // namespace jaxferry
