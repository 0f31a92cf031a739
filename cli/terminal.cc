// Tables and progress.
#include "terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "error.h"

namespace octet::cli {
namespace {

constexpr std::size_t kGap = 2;  // between columns

bool coloured() {
  static const bool yes = ::isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
  return yes;
}

std::string padded(const std::string& text, std::size_t width, Table::Align align) {
  return align == Table::Align::left ? fmt::format("{:<{}}", text, width) : fmt::format("{:>{}}", text, width);
}

}  // namespace

std::string bold(const std::string& text) { return coloured() ? "\033[1m" + text + "\033[0m" : text; }

std::string faint(const std::string& text) { return coloured() ? "\033[2m" + text + "\033[0m" : text; }

std::string wrapped(const std::string& text) {
  std::string out, line;
  for (std::size_t first = 0; first < text.size();) {
    const std::size_t last = std::min(text.find(' ', first), text.size());
    const std::string word = text.substr(first, last - first);
    if (!line.empty() && line.size() + 1 + word.size() > kWidth) out += line + '\n', line.clear();
    line += (line.empty() ? "" : " ") + word;
    first = last + 1;
  }
  return out + line;
}

void Table::print(std::size_t width) const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(column.title.size());
  for (const auto& row : rows_)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::vector<std::size_t> names;  // the columns that every part begins with
  while (names.size() < columns_.size() && columns_[names.size()].align == Align::left) names.push_back(names.size());
  for (std::size_t next = names.size(), part = 0; next < columns_.size() || part == 0; ++part) {
    std::vector<std::size_t> shown = names;
    std::size_t wide = 0;
    for (const std::size_t i : names) wide += widths[i] + kGap;
    while (next < columns_.size() && (shown.size() == names.size() || wide + widths[next] <= width))
      wide += widths[next] + kGap, shown.push_back(next++);
    if (part) fmt::print("\n");
    print_columns(widths, shown);
  }
}

void Table::print_columns(const std::vector<std::size_t>& widths, const std::vector<std::size_t>& shown) const {
  const auto line = [&](auto&& cell) {
    std::string out;
    for (const std::size_t i : shown)
      out += (out.empty() ? "" : std::string(kGap, ' ')) + padded(cell(i), widths[i], columns_[i].align);
    return out.substr(0, out.find_last_not_of(' ') + 1);
  };
  fmt::print("{}\n", bold(line([&](std::size_t i) { return columns_[i].title; })));
  for (const auto& row : rows_) fmt::print("{}\n", row.empty() ? "" : line([&](std::size_t i) { return row[i]; }));
}

Progress::Progress(std::size_t steps) : steps_(steps), shown_(::isatty(STDERR_FILENO)) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

void Progress::step(const std::string& what) {
  ++done_;
  say(what);
}

void Progress::say(const std::string& what) {
  if (!shown_) return;
  drawn_ = true;
  std::fputs(fmt::format("\r\033[K[{}/{}] {}", done_, steps_, what).c_str(), stderr);
  std::fflush(stderr);
}

void print_json(const std::vector<nlohmann::ordered_json>& objects) {
  std::string out;
  for (const auto& object : objects) out += (out.empty() ? "\n  " : ",\n  ") + object.dump();
  fmt::print("[{}\n]\n", out);
}

void flush_output() {
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && !std::ferror(stdout)) return;  // an earlier flush may have failed
  reject("standard output: cannot write: {}", errno ? std::strerror(errno) : "an earlier write failed");
}

std::string utf8(const std::string& text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  // How many bytes the character at i takes, 0 if there is none.
  const auto length = [&](std::size_t i) -> std::size_t {
    const unsigned lead = byte(i), second = byte(i + 1);
    const std::size_t n = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    for (std::size_t k = 1; k < n; ++k)
      if ((byte(i + k) & 0xc0) != 0x80) return 0;
    const bool overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
    const bool surrogate = lead == 0xed && second >= 0xa0, beyond = lead == 0xf4 && second >= 0x90;
    return overlong || surrogate || beyond ? 0 : n;
  };
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t n = length(i);
    out += n ? text.substr(i, n) : fmt::format("\\x{:02x}", byte(i));
    i += std::max<std::size_t>(n, 1);
  }
  return out;
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string error_text(double error) {
  if (error == 0) return "0";
  if (!std::isfinite(error)) return number_text("{}", error);
  if (std::fabs(error) < 1e-4 || std::fabs(error) >= 1e4) return fmt::format("{:.1e}", error);
  return std::fabs(error) < 10 ? fmt::format("{:.5f}", error) : fmt::format("{:.5g}", error);
}

std::string number_text(fmt::format_string<double&> format, double number) {
  return std::isnan(number) ? "nan" : fmt::format(format, number);
}

}  // namespace octet::cli
