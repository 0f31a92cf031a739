// The options of attention that several commands share, and their meaning for the library.
#pragma once
#include <CLI/CLI.hpp>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "array.h"
#include "device.h"
#include "names.h"

namespace octet::cli {

class AttentionOptions {
 public:
  void add_to(CLI::App& app);
  void add_mask_to(CLI::App& app);    // the mask and the scale alone
  void add_layout_to(CLI::App& app);  // of the tensors

  // For one precision, chosen by name: every option is passed on, so that the library rejects what does not belong.
  Attention attention(Precision precision) const;

  // For one of several precisions: options that belong to others are left out; expect_used has validated them.
  Attention attention_among(Precision precision) const;

  // Rejects options that belong to none of `precisions`.
  void expect_used(const std::vector<Precision>& precisions) const;

  // The tensors lie on --device, else where the backend asked for computes, else on the CPU.
  DeviceName device() const;

  // The seed and the offset of --dropout as the library takes them; absent without it.
  Array dropout_seed() const;

  bool causal() const { return !causal_.empty(); }
  Layout layout() const { return parse(kLayouts, "--layout", layout_); }
  bool given() const {  // any of add_mask_to
    return !(causal_.empty() && scale_.empty() && window_.empty());
  }

 private:
  std::string causal_, scale_, window_, softcap_, bias_correction_, beta_, hadamard_, smooth_q_, backend_, device_,
      tile_, dropout_, dropout_seed_, layout_ = "bhsd";
  uint32_t threads_ = 0;
  bool deterministic_ = false;
};

// "fwd,bwd" and "bf16,int8" as lists.
std::vector<Pass> parse_passes(const std::string& text);
std::vector<Precision> parse_precisions(const std::string& text);  // "all": every recipe but the oracle f64

}  // namespace octet::cli
