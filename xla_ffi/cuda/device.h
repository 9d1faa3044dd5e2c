// What the library keeps for each device.
#ifndef JAXFERRY_CUDA_DEVICE_H_
#define JAXFERRY_CUDA_DEVICE_H_

#include <mutex>

#include "cuda/ferry_table.h"
#include "cuda/marks.h"
#include "cuda/owners.h"
#include "cuda/product.h"

namespace jaxferry::cuda {

// One for each ordinal, made when it is first needed and never freed: CUDA may be gone before static objects are.
class Device {
 public:
  // The current device must be that one. Throws Failure where it has no streams left to give.
  static Device& Get(int ordinal);
  // Returns when the ferry's queues of each device are empty.
  static void SynchronizeFerry();

  // Held while an operation puts its work onto streams: that of two threads would else be mixed.
  std::mutex mutex;
  EventPool events{cudaEventDisableTiming};
  // The ferry's queues. Panels have streams of their own: they must not wait behind loads of whole layers.
  Stream loads, stores, panels_in, panels_out;
  FerryTable<EventPool::Lease> ferry;
  DeviceMarks marks;
  Multiplier multiplier;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_DEVICE_H_
