// What CUDA has operators for and the CPU has not: the kernels of batch norm in parts, cuDNN's
// operators, depthwise convolutions, dropout.

#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace simulated {

using at::Tensor;
using c10::IValue;
using Values = std::vector<IValue>;
using Kernel = std::function<Values(Values&)>;

inline Tensor optional(const IValue& value) { return value.isTensor() ? value.toTensor() : Tensor(); }

// -- batch norm in parts -----------------------------------------------------------------------
//
// As on the device, a result of float32 is rounded to float32. Sums have more digits than there.

inline std::vector<int64_t> all_but_channels(const Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < x.dim(); ++dim) dims.push_back(dim);
  return dims;
}

inline Tensor per_channel(const Tensor& values, const Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = -1;
  return values.reshape(shape);
}

inline Values stats(Values& given) {
  auto x = given[0].toTensor();
  double eps = given[1].toDouble();
  auto doubles = x.to(at::kDouble);
  auto dims = all_but_channels(x);
  auto [var, mean] = at::var_mean(doubles, dims, std::optional<int64_t>(0), false);
  mean = at::where(mean.isfinite(), mean, doubles.mean(dims));  // infinite, and not NaN
  // Where both are zero, so is the result.
  auto inverse = (var + eps).rsqrt();
  if (eps == 0) inverse = at::where(var == 0, at::zeros_like(var), inverse);
  return {mean.to(x.scalar_type()), inverse.to(x.scalar_type())};
}

/// A running statistic after a batch, in place.
template <class Value>
void update(const Tensor& running, int64_t channel, double momentum, Value value) {
  if (!running.defined()) return;
  auto& there = running.data_ptr<Value>()[channel * running.stride(0)];
  there = (Value)((1 - (Value)momentum) * there + (Value)momentum * value);
}

/// Merges moments one by one, in the accumulation dtype, with a count that is an int32, which
/// saturates when it is made from a float.
template <class Value>
void merge(const Tensor& means, const Tensor& inverses, const Tensor& counts, Tensor& mean,
           Tensor& inverse, const Tensor& running_mean, const Tensor& running_var, double momentum,
           Value eps) {
  for (int64_t channel = 0; channel < means.size(1); ++channel) {
    Value average = 0, sum_of_squares = 0;
    int number = 0;
    for (int64_t part = 0; part < means.size(0); ++part) {
      Value count = counts.const_data_ptr<Value>()[part];
      Value other = means.const_data_ptr<Value>()[part * means.size(1) + channel];
      Value deviation = 1 / inverses.const_data_ptr<Value>()[part * means.size(1) + channel];
      Value factor = (Value)(1.0 / (number + count));
      Value difference = average - other;
      sum_of_squares += (deviation * deviation - eps) * count;
      sum_of_squares += difference * difference * number * count * factor;
      average = number * factor * average + count * factor * other;
      Value sum = number + count;
      number = sum >= (Value)2147483648.0 ? 2147483647 : (int)sum;
    }
    mean.data_ptr<Value>()[channel] = average;
    inverse.data_ptr<Value>()[channel] = 1 / std::sqrt(sum_of_squares / number + eps);
    update<Value>(running_mean, channel, momentum, average);
    update<Value>(running_var, channel, momentum, sum_of_squares / (number - 1));
  }
}

inline Values gather(Values& given, const Tensor& counts) {
  auto means = given[1].toTensor().contiguous(), inverses = given[2].toTensor().contiguous();
  auto running_mean = optional(given[3]), running_var = optional(given[4]);
  double momentum = given[5].toDouble(), eps = given[6].toDouble();
  auto mean = at::empty({means.size(1)}, means.options()), inverse = at::empty_like(mean);
  auto numbers = counts.to(means.scalar_type()).contiguous();
  if (means.scalar_type() == at::kDouble)
    merge<double>(means, inverses, numbers, mean, inverse, running_mean, running_var, momentum, eps);
  else
    merge<float>(means, inverses, numbers, mean, inverse, running_mean, running_var, momentum, eps);
  return {mean, inverse};
}

inline Values gather_with_counts(Values& given) { return gather(given, given[7].toTensor()); }

inline Values gather_with_count(Values& given) {
  return gather(given, at::full({given[1].toTensor().size(0)}, given[7].toInt(), at::kDouble));
}

inline Values elemt(Values& given) {
  auto x = given[0].toTensor(), weight = optional(given[1]), bias = optional(given[2]);
  auto y = x - per_channel(given[3].toTensor(), x);
  if (weight.defined()) y = y * per_channel(weight, x);
  y = y * per_channel(given[4].toTensor(), x);
  return {bias.defined() ? y + per_channel(bias, x) : y};
}

inline Values backward_reduce(Values& given) {
  auto dy = given[0].toTensor(), x = given[1].toTensor(), mean = given[2].toTensor();
  auto dims = all_but_channels(x);
  auto doubles = dy.to(at::kDouble).reshape(x.sizes());
  auto centered = x.to(at::kDouble) - per_channel(mean.to(at::kDouble), x);
  auto sum_dy = doubles.sum(dims).to(mean.scalar_type());
  auto sum_dy_xmu = (doubles * centered).sum(dims).to(mean.scalar_type());
  // In channels_last the original returns all four, whatever is asked for.
  return {sum_dy, sum_dy_xmu, sum_dy_xmu * given[3].toTensor(), sum_dy};
}

inline Values backward_elemt(Values& given) {
  auto dy = given[0].toTensor(), x = given[1].toTensor(), mean = given[2].toTensor();
  auto inverse = given[3].toTensor(), weight = optional(given[4]);
  double factor = 1.0 / (double)given[7].toTensor().sum().item<int64_t>();
  auto scale = weight.defined() ? weight * inverse : inverse;
  auto slope = inverse * inverse * given[6].toTensor() * factor;
  auto centered = dy.reshape(x.sizes()) - per_channel(given[5].toTensor() * factor, x);
  centered = centered - (x - per_channel(mean, x)) * per_channel(slope, x);
  return {centered * per_channel(scale, x)};
}

// -- cuDNN -------------------------------------------------------------------------------------

/// (x, weight, bias, running_mean, running_var, training, momentum, eps)
inline Values cudnn_batch_norm(Values& given) {
  auto [y, mean, inverse] = at::native_batch_norm(
      given[0].toTensor(), optional(given[1]), optional(given[2]), optional(given[3]),
      optional(given[4]), given[5].toBool(), given[6].toDouble(), given[7].toDouble());
  return {y, mean, inverse, at::empty({0}, at::kByte)};
}

/// (x, dy, weight, running_mean, running_var, mean, inverse, eps, reserve)
inline Values cudnn_batch_norm_backward(Values& given) {
  auto [dx, dweight, dbias] = at::native_batch_norm_backward(
      given[1].toTensor(), given[0].toTensor(), optional(given[2]), optional(given[3]),
      optional(given[4]), optional(given[5]), optional(given[6]), true, given[7].toDouble(),
      {true, true, true});
  return {dx, dweight, dbias};
}

/// (x, weight, padding, stride, dilation, groups, ...)
inline Values cudnn_convolution(Values& given) {
  auto padding = given[2].toIntVector();
  std::vector<int64_t> none(padding.size(), 0);
  return {at::convolution(given[0].toTensor(), given[1].toTensor(), {}, given[3].toIntVector(),
                          padding, given[4].toIntVector(), false, none, given[5].toInt())};
}

/// (x, weight, padding, output_padding, stride, dilation, groups, ...)
inline Values cudnn_convolution_transpose(Values& given) {
  return {at::convolution(given[0].toTensor(), given[1].toTensor(), {}, given[4].toIntVector(),
                          given[2].toIntVector(), given[5].toIntVector(), true,
                          given[3].toIntVector(), given[6].toInt())};
}

// -- others ------------------------------------------------------------------------------------

/// (x, weight, kernel_size, bias, stride, padding, dilation)
inline Values depthwise(Values& given) {
  auto x = given[0].toTensor();
  auto padding = given[5].toIntVector();
  std::vector<int64_t> none(padding.size(), 0);
  return {at::convolution(x, given[1].toTensor(), optional(given[3]), given[4].toIntVector(),
                          padding, given[6].toIntVector(), false, none, x.size(1))};
}

/// (x, p, training), and the seed
inline Values dropout(Values& given) {
  auto x = given[0].toTensor();
  bool is_training = given[2].isNone() || given[2].toBool();
  double kept = is_training ? 1 - given[1].toDouble() : 1;
  auto generator = at::make_generator<at::CPUGeneratorImpl>((uint64_t)given.back().toInt());
  auto mask = at::empty(x.sizes(), at::kBool).bernoulli_(kept, generator);
  return {x * mask * (kept ? 1 / kept : 0), mask};
}

/// (x, the share that is kept, generator)
inline Values fused_dropout(Values& given) {
  auto x = given[0].toTensor();
  double kept = given[1].toDouble();
  auto mask = at::empty(x.sizes(), at::kByte).bernoulli_(kept, given[2].toGenerator());
  return {x * mask * (1 / kept), mask};
}

/// Writes the only result to the last argument.
inline Kernel into_out(Kernel kernel) {
  return [kernel](Values& given) {
    auto out = given.back().toTensor();
    out.copy_(kernel(given)[0].toTensor());
    return Values{out};
  };
}

inline Kernel kernel_of(const std::string& name) {
  static const std::map<std::string, Kernel> kernels{
      {"batch_norm_stats", stats},
      {"batch_norm_gather_stats_with_counts", gather_with_counts},
      {"batch_norm_gather_stats", gather_with_count},
      {"batch_norm_elemt", elemt},
      {"batch_norm_elemt.out", into_out(elemt)},
      {"batch_norm_backward_reduce", backward_reduce},
      {"batch_norm_backward_elemt", backward_elemt},
      {"cudnn_batch_norm", cudnn_batch_norm},
      {"cudnn_batch_norm_backward", cudnn_batch_norm_backward},
      {"cudnn_convolution", cudnn_convolution},
      {"cudnn_convolution_transpose", cudnn_convolution_transpose},
      {"_conv_depthwise2d", depthwise},
      {"_conv_depthwise2d.out", into_out(depthwise)},
      {"conv_depthwise3d", depthwise},
      {"native_dropout", dropout},
      {"_fused_dropout", fused_dropout},
      // Attention is made of other operators.
      {"_fused_sdp_choice", [](Values&) { return Values{(int64_t)0}; }},
  };
  auto found = kernels.find(name);
  return found == kernels.end() ? Kernel() : found->second;
}

}  // namespace simulated
