#include "support/case_list.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace octet::test {

namespace {

using Json = nlohmann::ordered_json;

// Words that stand for values of an enum; the enumerators' own names.
template <class Enum>
using Words = std::vector<std::pair<const char*, Enum>>;

const Words<Alignment> kAlignments = {{"top_left", Alignment::top_left}, {"bottom_right", Alignment::bottom_right}};
const Words<MaskTensor> kMasks = {
    {"keys", MaskTensor::keys},           {"padding", MaskTensor::padding}, {"left_padding", MaskTensor::left_padding},
    {"heads", MaskTensor::heads},         {"blind", MaskTensor::blind},     {"bias_f32", MaskTensor::bias_f32},
    {"bias_bf16", MaskTensor::bias_bf16}, {"blocks", MaskTensor::blocks},   {"bias_blocks", MaskTensor::bias_blocks}};
const Words<DType> kDTypes = {{"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}, {"e4m3", DType::e4m3}};
const Words<DType> kOutDTypes = {{"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}};
const Words<Layout> kLayouts = {
    {"bhtd", Layout::bhtd}, {"bthd", Layout::bthd}, {"transposed", Layout::transposed}, {"padded", Layout::padded}};
const Words<Layout> kKvLayouts = [] {
  Words<Layout> list = kLayouts;
  list.push_back({"broadcast", Layout::broadcast});
  return list;
}();
const Words<Sinks> kSinks = {{"shared", Sinks::shared}, {"of_batch", Sinks::of_batch}};
const Words<Seeds> kSeeds = {{"shared", Seeds::shared}, {"each", Seeds::each}};
const Words<Alibi> kAlibis = {{"shared", Alibi::shared}, {"each", Alibi::each}};

// One row of the file. Every field is asked for once; `finish` rejects what nobody asked for.
class Row {
 public:
  Row(std::string where, const Json& fields) : where_(std::move(where)), fields_(fields) {
    if (!fields.is_object()) throw error("found " + fields.dump() + ", allowed: an object");
  }

  std::runtime_error error(const std::string& what) const {
    return std::runtime_error("tests/cases.json, " + where_ + ": " + what);
  }

  template <class T>
  void text(const char* field, T& value) {
    get(field, value, &Json::is_string, "a string");
  }
  void flag(const char* field, bool& value) { get(field, value, &Json::is_boolean, "true or false"); }
  template <class T>
  void number(const char* field, T& value) {
    get(field, value, &Json::is_number, "a number");
  }
  void count(const char* field, int64_t& value) {
    if (const Json* found = find(field)) value = integer(field, *found, 0, std::numeric_limits<int32_t>::max());
  }
  template <class Enum>
  void word(const char* field, Enum& value, const Words<Enum>& words) {
    const Json* found = find(field);
    if (!found) return;
    const auto same = [&](const auto& word) { return *found == word.first; };
    const auto at = std::find_if(words.begin(), words.end(), same);
    if (at == words.end()) {
      std::vector<std::string> allowed;
      for (const auto& word : words) allowed.push_back(word.first);
      throw error(std::string(field) + ": found " + found->dump() + ", allowed: " + joined(allowed));
    }
    value = at->second;
  }
  // Integers of a list; `least` is the smallest allowed.
  std::vector<int32_t> integers(const char* field, int64_t least) {
    std::vector<int32_t> list;
    const Json* found = find(field);
    if (!found) return list;
    if (!found->is_array()) throw error(std::string(field) + ": found " + found->dump() + ", allowed: integers in []");
    for (const Json& x : *found)
      list.push_back(static_cast<int32_t>(integer(field, x, least, std::numeric_limits<int32_t>::max())));
    return list;
  }
  void finish() const {
    for (const auto& [field, value] : fields_.items())
      if (std::find(asked_.begin(), asked_.end(), field) == asked_.end())
        throw error("found field " + field + ", allowed: " + joined(asked_));
  }

 private:
  static std::string joined(const std::vector<std::string>& words) {
    std::string all;
    for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
    return all;
  }
  const Json* find(const char* field) {
    asked_.push_back(field);
    const auto at = fields_.find(field);
    return at == fields_.end() ? nullptr : &*at;
  }
  template <class T>
  void get(const char* field, T& value, bool (Json::*is)() const noexcept, const char* allowed) {
    const Json* found = find(field);
    if (!found) return;
    if (!(found->*is)()) throw error(std::string(field) + ": found " + found->dump() + ", allowed: " + allowed);
    value = found->get<std::decay_t<decltype(value)>>();
  }
  int64_t integer(const char* field, const Json& x, int64_t least, int64_t most) const {
    if (!x.is_number_integer() || x < least || x > most)
      throw error(std::string(field) + ": found " + x.dump() + ", allowed: an integer from " + std::to_string(least) +
                  " to " + std::to_string(most));
    return x.get<int64_t>();
  }

  std::string where_;
  const Json& fields_;
  std::vector<std::string> asked_;
};

Case case_of(Row& row, std::string& name) {
  Case c{};
  std::string note;
  row.text("name", name), row.text("note", note);
  row.count("batch", c.batch), row.count("heads", c.heads), row.count("kv_heads", c.kv_heads);
  row.count("tokens_q", c.tokens_q), row.count("tokens_k", c.tokens_k);
  row.count("dim", c.dim), row.count("dim_v", c.dim_v);
  row.flag("causal", c.causal);
  if (const auto sides = row.integers("window", -1); sides.size() == 2)
    c.window = {{sides[0], sides[1]}};
  else if (!sides.empty())
    throw row.error("window: found " + std::to_string(sides.size()) + " integers, allowed: left and right");
  row.word("alignment", c.alignment, kAlignments);
  row.word("mask", c.mask, kMasks);
  c.cu_seqlens_q = row.integers("cu_seqlens_q", 0), c.cu_seqlens_k = row.integers("cu_seqlens_k", 0);
  if (float scale = 0; row.number("scale", scale), scale != 0) c.scale = scale;
  row.word("dtype", c.dtype, kDTypes), row.word("out_dtype", c.out_dtype, kOutDTypes);
  row.word("layout", c.layout, kLayouts), row.word("kv_layout", c.kv_layout, kKvLayouts);
  row.flag("interleaved", c.interleaved);
  row.word("sinks", c.sinks, kSinks);
  row.flag("dlse", c.dlse);
  row.number("softcap", c.softcap);
  row.word("alibi", c.alibi, kAlibis);
  row.number("dropout_p", c.dropout_p);
  row.word("seeds", c.seeds, kSeeds);
  row.flag("dmask", c.dmask);
  row.finish();
  return c;
}

}  // namespace

std::vector<Case> read_cases(const std::string& text, std::deque<std::string>& names) {
  std::vector<Case> list;
  const Json groups = Json::parse(text);
  if (!groups.is_object()) throw std::runtime_error("tests/cases.json: allowed: {group: [case, ...], ...}");
  for (const auto& [group, rows] : groups.items()) {
    if (!rows.is_array()) throw std::runtime_error("tests/cases.json, " + group + ": allowed: [case, ...]");
    for (const Json& fields : rows) {
      const bool named = fields.is_object() && fields.contains("name") && fields["name"].is_string();
      Row row(named ? fields["name"].get<std::string>() : group, fields);
      std::string name;
      Case c = case_of(row, name);
      if (name.empty()) throw row.error("a case without a name");
      if (std::find(names.begin(), names.end(), name) != names.end()) throw row.error("two cases have this name");
      c.name = names.emplace_back(name).c_str();
      list.push_back(c);
    }
  }
  return list;
}

const std::vector<Case>& cases() {
  static const char text[] =
#include "support/cases_json.inc"
      ;
  static std::deque<std::string> names;
  static const std::vector<Case> list = read_cases(text, names);
  return list;
}

}  // namespace octet::test
