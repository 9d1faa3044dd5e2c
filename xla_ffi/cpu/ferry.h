// The two queues of the process, one a direction. No XLA types.
#ifndef JAXFERRY_CPU_FERRY_H_
#define JAXFERRY_CPU_FERRY_H_

#include <functional>

#include "common/calls.h"
#include "cpu/callbacks.h"
#include "cpu/ferry_queue.h"

namespace jaxferry {

// Across the link, and, which no queue does, between the host and its own memory.
enum Direction { kLoad = 0, kStore = 1, kHost = 2 };

class Ferry {
 public:
  // That of the process; a child that was forked gets queues of its own, empty ones.
  static Ferry& Get();

  // The emulator's settings, the same for a parent and its children.
  static LinkSettings& Settings(Direction direction);

  Ferry() : queues_{{Settings(kLoad), callbacks_}, {Settings(kStore), callbacks_}} {}

  FerryQueue& queue(Direction direction) { return queues_[direction]; }

  // Has `callback` called once no queued copy touches these bytes: now, or later by another thread.
  void CallWhenDone(const Ranges& ranges, std::function<void()> callback);

  void Synchronize();

  // Drops what is queued and ends all threads.
  void Stop();

 private:
  Callbacks callbacks_;
  FerryQueue queues_[2];
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_FERRY_H_
