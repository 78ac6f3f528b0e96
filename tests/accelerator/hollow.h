// Kernels that compute nothing: they return memory of the right shape after as long as a launch
// takes. So `benchmarks.host` sees the host's own time.

#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <chrono>
#include <memory>
#include <tuple>

namespace simulated::hollow {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr std::chrono::microseconds LAUNCH{4};

/// Takes the time of one launch, without the GIL as every operation of torch.
struct Launch {
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  ~Launch() {
    while (std::chrono::steady_clock::now() - begin < LAUNCH) {
    }
  }
};

Tensor vector_of(const Tensor& x) { return at::empty({x.size(1)}, x.options()); }

std::tuple<Tensor, Tensor> stats(const Tensor& x, double) {
  Launch launch;
  return {vector_of(x), vector_of(x)};
}

std::tuple<Tensor, Tensor> gather(const Tensor& x, const Tensor& mean, const Tensor&,
                                  const Optional&, const Optional&, double, double, const Tensor&) {
  Launch launch;
  return {at::empty_like(mean[0]), at::empty_like(mean[0])};
}

Tensor elemt(const Tensor& x, const Optional&, const Optional&, const Tensor&, const Tensor&,
             double) {
  Launch launch;
  return at::empty_like(x);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> reduce(const Tensor&, const Tensor& x, const Tensor&,
                                                  const Tensor&, const Optional&, bool, bool, bool) {
  Launch launch;
  return {vector_of(x), vector_of(x), Tensor(), Tensor()};
}

Tensor backward_elemt(const Tensor&, const Tensor& x, const Tensor&, const Tensor&, const Optional&,
                      const Tensor&, const Tensor&, const Tensor&) {
  Launch launch;
  return at::empty_like(x);
}

std::tuple<Tensor, Tensor, Tensor> plain(const Tensor& x, const Optional&, const Optional&,
                                         const Optional&, const Optional&, bool, double, double) {
  Launch launch;
  return {at::empty_like(x), vector_of(x), vector_of(x)};
}

std::tuple<Tensor, Tensor, Tensor> plain_backward(const Tensor&, const Tensor& x, const Optional&,
                                                  const Optional&, const Optional&, const Optional&,
                                                  const Optional&, bool, double,
                                                  std::array<bool, 3>) {
  Launch launch;
  return {at::empty_like(x), vector_of(x), vector_of(x)};
}

void register_kernels() {
  static auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl("batch_norm_stats", stats);
  library->impl("batch_norm_gather_stats_with_counts", gather);
  library->impl("batch_norm_elemt", elemt);
  library->impl("batch_norm_backward_reduce", reduce);
  library->impl("batch_norm_backward_elemt", backward_elemt);
  library->impl("native_batch_norm", plain);
  library->impl("native_batch_norm_backward", plain_backward);
}

}  // namespace simulated::hollow
