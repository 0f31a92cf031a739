#include "eight_bits.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"

namespace octet::cli {
namespace {

struct Row {
  const char *card, *measured, *backend;  // measured: the date, "": predicted
  int64_t dim, tokens;
  bool causal;
  const char* precision;
  double times;  // as fast as bf16
};

constexpr Row kRows[] = {
#include "eight_bits.inc"
};

// An H100 has the multiprocessors of an H200; what is said names the card that was measured.
constexpr std::string_view kSameChip[][2] = {{"H100", "H200"}, {"GH200", "H200"}};

constexpr int64_t kFewestTokens = 2048;  // with fewer, quantization takes a larger part than at the shapes of the table

bool names(std::string_view card, std::string_view known) {
  for (const auto& [name, same] : kSameChip)
    if (card.find(name) != card.npos) card = same;
  return card.find(known) != card.npos || known.find(card) != known.npos;
}

}  // namespace

void expect_known_card(const std::string& card) {
  std::vector<std::string> known;
  for (const Row& row : kRows) {
    if (names(card, row.card)) return;
    if (std::find(known.begin(), known.end(), row.card) == known.end()) known.push_back(row.card);
  }
  reject("--card: found \"{}\", allowed: {}", card, fmt::join(known, ", "));
}

nlohmann::ordered_json eight_bits(const std::string& card, const std::string& backend, const ProblemShape& shape,
                                  bool causal) {
  const int64_t tokens = std::min(shape.tokens_q, shape.tokens_k);
  if (card.empty() || tokens < kFewestTokens) return nullptr;
  const Row* best = nullptr;
  // The better of two rows: of the mask, then of the nearest number of tokens.
  const auto distance = [&](const Row& row) {
    return std::pair(row.causal != causal, std::abs(std::log2(double(row.tokens) / tokens)));
  };
  std::string wanted = backend;
  for (const Row& row : kRows) {
    if (!names(card, row.card) || shape.dim > 128 || row.dim != (shape.dim <= 64 ? 64 : 128)) continue;
    if (wanted.empty()) wanted = row.backend;  // octet's own choice comes first
    if (wanted == row.backend && (!best || distance(row) < distance(*best))) best = &row;
  }
  if (!best) return nullptr;
  std::vector<const Row*> found;
  for (const Row& row : kRows)
    if (row.card == std::string_view(best->card) && row.backend == std::string_view(best->backend) &&
        row.dim == best->dim && row.tokens == best->tokens && row.causal == best->causal)
      found.push_back(&row);
  std::stable_sort(found.begin(), found.end(), [](const Row* a, const Row* b) { return a->times > b->times; });
  nlohmann::ordered_json times;
  for (const Row* row : found) times[row->precision] = row->times;
  return {{"card", best->card},
          {"measured", *best->measured ? nlohmann::ordered_json(best->measured) : nlohmann::ordered_json()},
          {"backend", best->backend},
          {"dim", best->dim},
          {"tokens", best->tokens},
          {"causal", best->causal},
          {"times_as_fast_as_bf16", times}};
}

std::string describe_eight_bits(const std::string& card, const nlohmann::ordered_json& found) {
  if (found.is_null()) return fmt::format("neither measured nor predicted for this shape on {}", card);
  std::string speeds;
  for (const auto& [precision, times] : found.at("times_as_fast_as_bf16").items())
    speeds += fmt::format("{}{} {:.2f}", speeds.empty() ? "" : ", ", precision, times.get<double>());
  const auto text = [&](const char* name) { return found.at(name).get<std::string>(); };
  const std::string how = found.at("measured").is_null()
                              ? fmt::format("predicted for {}, where nobody has measured it,", text("card"))
                              : fmt::format("measured on {}, {},", text("card"), text("measured"));
  return fmt::format("{} times as fast as bf16; {} with {} at head dim {} and {} tokens, {}", speeds, how,
                     text("backend"), found.at("dim").get<int64_t>(), found.at("tokens").get<int64_t>(),
                     found.at("causal") ? "causal" : "no mask");
}

}  // namespace octet::cli
