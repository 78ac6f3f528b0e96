// The kernels that torch has, for the reports.

#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

struct Kernel {
  std::string name;  // mangled
  std::atomic<long long> launches{0}, captured{0};
  int most_dynamic_memory = 48 * 1024;
  /// For each parameter, the number of pointers that it begins with (see launches.cpp).
  std::vector<int> pointers;
  std::once_flag knows_pointers;
};

void each_kernel(const std::function<void(Kernel&)>& visit);

}  // namespace simulated
