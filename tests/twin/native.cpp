// A CUDA without a card: a device guard and hooks that do nothing, so that fake tensors on "cuda" run backward in any
// build of torch. Loaded before torch, which looks the hooks up once (native.py). torch's CUDA build has both itself:
// of two hooks it takes those of higher priority; what it sets while it is loaded is replaced behind it, by twin_enter.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>

namespace {

thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex count() {
  const char* number = std::getenv("TWIN_GPUS");
  return static_cast<c10::DeviceIndex>(number ? std::atoi(number) : 1);
}

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto old = current;
  if (index >= 0) current = index;
  return old;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device at(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index < 0 ? current : index}; }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return at(exchange(device.index())); }
  c10::Device getDevice() const override { return at(current); }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange(device.index()); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, at(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

// What a card takes where there is a mask; torch's own choice asks for the card's properties.
int64_t attention_of(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                     bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
}

}  // namespace

extern "C" void twin_enter() {
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, new Guard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(attention_of);
}

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex = -1) const override { return make_generator<CPUGeneratorImpl>(); }
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at
