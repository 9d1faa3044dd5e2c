// A queue of copies in one direction, run by a thread of its own, first in, first out; optionally as slow as a link.
//
//   Push --> [copies] [copies] [copies] --> worker: delay, copy a piece, sleep until a link would have carried it
//   CallWhenDone(ranges) hangs a callback onto the last copies that touch them --> Callbacks, on threads of their own
//
// No XLA types.
#ifndef JAXFERRY_CPU_FERRY_QUEUE_H_
#define JAXFERRY_CPU_FERRY_QUEUE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "common/calls.h"
#include "cpu/callbacks.h"
#include "cpu/marks.h"

namespace jaxferry {

// What the link emulator is set to.
struct LinkSettings {
  std::atomic<double> bytes_per_s{0.0};  // 0: no limit
  std::atomic<double> delay_s{0.0};      // longest random delay before a copy
  std::atomic<unsigned> seed{0};
  std::atomic<unsigned> num_seeds{0};  // counts changes of the seed
};

class FerryQueue {
 public:
  FerryQueue(const LinkSettings& settings, Callbacks& callbacks) : settings_(settings), callbacks_(callbacks) {}
  FerryQueue(const FerryQueue&) = delete;
  FerryQueue& operator=(const FerryQueue&) = delete;
  ~FerryQueue() { Stop(); }

  // Appends copies and returns at once. The first call starts the thread. False once the queue has stopped.
  bool Push(Copies copies);

  // Says when the copies pushed since the last mark have started and ended, once they have.
  void Mark(std::shared_ptr<Times> times);

  // Has `callback` called once all copies queued so far that read or write these bytes have ended. False, and no call,
  // where there are none.
  bool CallWhenDone(const Ranges& ranges, const std::function<void()>& callback);

  // Returns when everything pushed before has ended.
  void Synchronize();

  // Has a thread that sleeps look at the settings again.
  void NoteSettings();

  // Ends the thread after the piece that it is at; what is queued is dropped, its callbacks are never called.
  void Stop();

 private:
  struct Transfer {
    Copies copies;
    Clock::time_point pushed;
    std::vector<std::function<void()>> callbacks;
    std::shared_ptr<Times> mark;  // null where it is no mark
  };

  bool Push(Transfer transfer);
  void Work();
  void Run(const Transfer& transfer);
  void RunPieces(const Copy& copy);
  bool SleepUntil(Clock::time_point time, const std::atomic<double>& setting);
  Clock::duration DrawDelay();

  const LinkSettings& settings_;
  Callbacks& callbacks_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Transfer> transfers_;  // the first one is under way; a worker's reference to it survives push_back
  std::thread worker_;
  bool is_stopped_ = false;

  // The worker's alone.
  Clock::time_point link_is_free_{};
  std::optional<Clock::time_point> marked_start_;  // of the first copies since the last mark
  std::mt19937 random_;
  unsigned seeds_seen_ = 0;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_FERRY_QUEUE_H_
