// The process's two queues, one per direction. No XLA types.
#ifndef JAXFERRY_CPU_FERRY_H_
#define JAXFERRY_CPU_FERRY_H_

#include <functional>

#include "common/calls.h"
#include "cpu/callbacks.h"
#include "cpu/ferry_queue.h"

namespace jaxferry {

// The directions of the link, and the host's own memory traffic, which has no queue.
enum Direction { kLoad = 0, kStore = 1, kHost = 2 };

class Ferry {
 public:
  // Returns the process's instance; a forked child gets its own, with empty queues.
  static Ferry& Get();

  // Returns the emulator's settings, which forked children inherit.
  static LinkSettings& Settings(Direction direction);

  Ferry() : queues_{{Settings(kLoad), callbacks_}, {Settings(kStore), callbacks_}} {}

  FerryQueue& queue(Direction direction) { return queues_[direction]; }

  // Calls `callback` once no queued copy touches these bytes: immediately, or later on another thread.
  void CallWhenDone(const Ranges& ranges, std::function<void()> callback);

  // Waits until no queued copy touches these bytes.
  void WaitFor(const Ranges& ranges);

  void Synchronize();

  // Drops queued copies and ends all threads.
  void Stop();

 private:
  Callbacks callbacks_;
  FerryQueue queues_[2];
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_FERRY_H_
