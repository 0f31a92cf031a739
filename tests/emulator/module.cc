// Reads PTX as the compiler writes it: the functions of a module, then the instructions of those that are used.
#include <cctype>

#include "decoder.h"

namespace emulator {
namespace {

std::string without_comments(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "//") == 0)
      while (i < text.size() && text[i] != '\n') ++i;
    else if (text.compare(i, 2, "/*") == 0)
      i = text.find("*/", i + 2) + 1;
    if (i < text.size()) out += text.compare(i, 1, "/") == 0 ? ' ' : text[i];
  }
  return out;
}

bool blank(char c) { return std::isspace(static_cast<unsigned char>(c)); }
bool of_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

struct Reader {
  const std::string& text;
  std::size_t at = 0;
  void skip_blanks() {
    while (at < text.size() && blank(text[at])) ++at;
  }
  std::string word() {
    skip_blanks();
    const std::size_t first = at;
    while (at < text.size() && of_name(text[at])) ++at;
    return text.substr(first, at - first);
  }
  // Through the next of `ends`, which is not part of the result.
  std::string until(char end) {
    const std::size_t first = at;
    at = text.find(end, at);
    if (at == std::string::npos) throw Error("PTX that ends too early");
    return text.substr(first, at++ - first);
  }
  // What braces or parentheses hold; `at` is behind the first of them.
  std::string inside(char open, char close) {
    const std::size_t first = at;
    for (int depth = 1; depth; ++at) {
      if (at >= text.size()) throw Error("PTX that ends too early");
      depth += (text[at] == open) - (text[at] == close);
    }
    return text.substr(first, at - 1 - first);
  }
};

uint8_t bytes_of_type(const std::string& type) {  // ".b32"
  return type == ".pred" ? 1 : static_cast<uint8_t>(std::stoi(type.substr(2)) / 8);
}
uint32_t aligned(uint32_t x, uint32_t to) { return (x + to - 1) / to * to; }

struct Variable {
  std::string name;
  uint32_t alignment = 1, bytes = 0;
  bool has_size = true;
};
// Of ".align 8 .b8 name[904]", ".b64 name"
Variable variable(const std::string& declaration) {
  Reader r{declaration};
  Variable v;
  uint32_t element = 1;
  bool given = false;
  for (;;) {
    const std::string word = r.word();
    if (word == ".align")
      v.alignment = static_cast<uint32_t>(std::stoul(r.word())), given = true;
    else if (word == ".param" || word == ".ptr" || word == ".global" || word == ".shared")
      continue;
    else if (word.starts_with('.'))
      element = bytes_of_type(word);
    else {
      v.name = word;
      break;
    }
  }
  if (!given) v.alignment = element;
  v.bytes = element;
  r.skip_blanks();
  if (r.at < declaration.size() && declaration[r.at] == '[') {
    ++r.at;
    const std::string size = r.until(']');
    v.has_size = !size.empty();
    v.bytes = v.has_size ? element * static_cast<uint32_t>(std::stoul(size)) : 0;
  }
  return v;
}

std::vector<std::string> list(const std::string& text) {
  std::vector<std::string> out;
  std::size_t first = 0;
  for (std::size_t comma; (comma = text.find(',', first)) != std::string::npos; first = comma + 1)
    out.push_back(text.substr(first, comma - first));
  if (text.find_first_not_of(" \t\n", first) != std::string::npos) out.push_back(text.substr(first));
  return out;
}

void decode_body(Function& f, const std::vector<std::string>& dynamic_shared,
                 const std::vector<std::string>& parameters) {
  Decoder decoder(f);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    decoder.add_symbol(parameters[i], Constant::parameter, f.parameters[i].offset);
  std::unordered_map<std::string, uint32_t> labels;
  std::vector<std::pair<uint32_t, std::string>> branches;
  // Shared variables that the function declares come first: the dynamic ones begin behind them.
  for (const auto& name : dynamic_shared) decoder.add_symbol(name, Constant::dynamic_shared, 0);

  Reader r{f.body};
  for (;;) {
    r.skip_blanks();
    if (r.at >= f.body.size()) break;
    const char c = f.body[r.at];
    if (c == '{') {
      decoder.push(), ++r.at;
      continue;
    }
    if (c == '}') {
      decoder.pop(), ++r.at;
      continue;
    }
    if (c == ';') {
      ++r.at;
      continue;
    }
    const std::size_t start = r.at;
    std::string word;
    if (c == '@') {
      ++r.at;
      if (f.body[r.at] == '!') ++r.at;
      word = "@" + r.word();
    } else {
      word = r.word();
    }
    if (r.at < f.body.size() && f.body[r.at] == ':' && c != '@') {
      labels[word] = static_cast<uint32_t>(f.code.size()), ++r.at;
      continue;
    }
    if (word == ".loc") {
      r.until('\n');
      continue;
    }
    if (word == ".pragma") {
      r.until(';');
      continue;
    }
    if (word == ".reg") {
      const uint8_t bytes = bytes_of_type(r.word());
      for (const std::string& item : list(r.until(';'))) {
        Reader one{item};
        const std::string name = one.word();
        one.skip_blanks();
        if (one.at < item.size() && item[one.at] == '<') {
          ++one.at;
          const int count = std::stoi(one.until('>'));
          for (int i = 0; i < count; ++i) decoder.add_register(name + std::to_string(i), bytes);
        } else {
          decoder.add_register(name, bytes);
        }
      }
      continue;
    }
    if (word == ".local" || word == ".param" || word == ".shared") {
      const Variable v = variable(r.until(';'));
      uint32_t& used = word == ".shared" ? f.shared_bytes : f.local_bytes;
      used = aligned(used, std::max(v.alignment, 8u));
      decoder.add_symbol(v.name, word == ".shared" ? Constant::number : Constant::local, used);
      used += v.bytes;
      continue;
    }

    Instruction n;
    r.at = start;
    std::string statement = r.until(';');
    while (!statement.empty() && blank(statement.back())) statement.pop_back();
    n.text = statement;
    if (c == '@') {
      n.guarded = true, n.negated = statement[1] == '!';
      const std::size_t space = statement.find_first_of(" \t");
      n.guard = decoder.operand(statement.substr(n.negated ? 2 : 1, space - (n.negated ? 2 : 1)), 1).place;
      statement = statement.substr(statement.find_first_not_of(" \t", space));
    }
    if (statement.starts_with("bra")) {
      n.kind = Instruction::branch;
      branches.emplace_back(f.code.size(), statement.substr(statement.find_last_of(" \t") + 1));
    } else {
      decode(statement, decoder, n);
    }
    f.code.push_back(std::move(n));
  }
  Instruction end;
  end.kind = Instruction::exit, end.text = "end";
  f.code.push_back(end);
  for (const auto& [at, label] : branches) f.code[at].target = labels.at(label);
  f.local_bytes = aligned(f.local_bytes, 16);
  f.decoded = true;
}

struct Unread {
  std::vector<std::string> dynamic_shared, parameters;
};
std::unordered_map<const Function*, Unread>& unread() {
  static std::unordered_map<const Function*, Unread> all;
  return all;
}

}  // namespace

Module::Module(const std::string& ptx) {
  const std::string text = without_comments(ptx);
  Reader r{text};
  std::vector<std::string> dynamic_shared;
  for (;;) {
    r.skip_blanks();
    if (r.at >= text.size()) break;
    const std::string word = r.word();
    if (word == ".version" || word == ".target" || word == ".address_size") {
      r.until('\n');
    } else if (word == ".visible" || word == ".weak" || word == ".extern") {
      continue;
    } else if (word == ".shared") {
      const Variable v = variable(r.until(';'));
      if (v.has_size) throw Error("a shared variable of a module: " + v.name);
      dynamic_shared.push_back(v.name);
    } else if (word == ".entry" || word == ".func") {
      Function f;
      Unread names;
      const auto take_parameters = [&] {
        r.skip_blanks();
        if (text[r.at] != '(') return;
        ++r.at;
        for (const std::string& p : list(r.inside('(', ')'))) {
          const Variable v = variable(p);
          f.parameter_bytes = aligned(f.parameter_bytes, v.alignment);
          f.parameters.push_back({f.parameter_bytes, v.bytes});
          names.parameters.push_back(v.name);
          f.parameter_bytes += v.bytes;
        }
      };
      take_parameters();  // what it returns, which the caller holds like an argument
      f.name = r.word();
      take_parameters();
      while (r.at < text.size() && text[r.at] != '{' && text[r.at] != ';') ++r.at;
      if (text[r.at++] == ';') continue;  // a declaration
      f.body = r.inside('{', '}');
      names.dynamic_shared = dynamic_shared;
      auto& stored = functions[f.name] = std::move(f);
      unread()[&stored] = std::move(names);
    } else {
      throw Error("no such statement here: " + word + text.substr(r.at, 40));
    }
  }
}

Function& Module::find(const std::string& name) {
  const auto found = functions.find(name);
  if (found == functions.end()) throw Error("no function " + name);
  Function& f = found->second;
  if (!f.decoded) {
    const Unread& names = unread().at(&f);
    try {
      decode_body(f, names.dynamic_shared, names.parameters);
    } catch (const std::exception& e) {
      throw Error(f.name + ": " + e.what());
    }
    for (const Instruction& n : f.code)
      if (!n.callee.empty()) find(n.callee);
  }
  return f;
}

}  // namespace emulator
