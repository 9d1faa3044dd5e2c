#include "cuda/device.h"

#include <map>
#include <memory>

namespace jaxferry::cuda {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Device>> devices;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

Device& Device::Get(int ordinal) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::unique_ptr<Device>& device = registry.devices[ordinal];
  if (device == nullptr) device = std::make_unique<Device>();
  return *device;
}

void Device::SynchronizeFerry() {
  std::map<int, Device*> devices;
  {
    // Unlocked while waiting, so that other threads can get their devices.
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    for (const auto& [ordinal, device] : registry.devices) devices[ordinal] = device.get();
  }
  for (const auto& [ordinal, device] : devices) {
    if (device == nullptr) continue;
    const CurrentDevice current(ordinal);
    Check(cudaStreamSynchronize(device->loads.get()), "waiting for loads");
    Check(cudaStreamSynchronize(device->stores.get()), "waiting for stores");
  }
}

}  // namespace jaxferry::cuda
