// A FIFO queue of copies in one direction, run by its own thread; optionally throttled to a link's speed.
//
//   Push --> [copies] [copies] [copies] --> worker: delay, copy a piece, sleep until a link would have carried it
//   CallWhenDone(ranges) attaches a callback to the last copies that touch them --> Callbacks, on separate threads
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

// Settings of the link emulator.
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

  // Appends copies and returns immediately. The first call starts the thread. Returns false once the queue has stopped.
  bool Push(Copies copies);

  // Stores start and end of the copies pushed since the last mark, once they have ended.
  void Mark(std::shared_ptr<Times> times);

  // Calls `callback` once all copies queued so far that read or write these bytes have ended. Returns false, without a
  // call, if there are none.
  bool CallWhenDone(const Ranges& ranges, const std::function<void()>& callback);

  // Waits until no queued copy reads or writes these bytes, or the queue has stopped.
  void WaitFor(const Ranges& ranges);

  // Waits for everything pushed before.
  void Synchronize();

  // Makes a sleeping thread read the settings again.
  void NoteSettings();

  // Ends the thread after its current piece; queued copies are dropped and their callbacks never called.
  void Stop();

 private:
  struct Transfer {
    Copies copies;
    Clock::time_point pushed;
    std::vector<std::function<void()>> callbacks;
    std::shared_ptr<Times> mark;  // null if it is not a mark
  };

  bool Push(Transfer transfer);
  void Work();
  void Run(const Transfer& transfer);
  void RunPieces(const Copy& copy);
  bool SleepUntilFree(const std::atomic<double>& setting, double was);
  Clock::duration DrawDelay(double longest_s);

  const LinkSettings& settings_;
  Callbacks& callbacks_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Transfer> transfers_;  // the first one is in flight; a worker's reference to it survives push_back
  std::thread worker_;
  bool is_stopped_ = false;

  // Used only by the worker.
  Clock::time_point link_is_free_{};
  std::optional<Clock::time_point> marked_start_;  // of the first copies since the last mark
  std::mt19937 random_;
  unsigned seeds_seen_ = 0;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_FERRY_QUEUE_H_
