// Output for people: tables go to standard output, progress to standard error. Colours and progress need a terminal.
#pragma once
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace octet::cli {

// A table with a header line. Columns are as wide as their widest cell; numbers are aligned on the right.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void gap() { rows_.emplace_back(); }  // an empty line
  bool empty() const { return rows_.empty(); }
  // Where a line would be wider than `width`, columns that do not fit follow in a table of their own, after the columns
  // of text that the rows begin with.
  void print(std::size_t width = std::string::npos) const;

 private:
  void print_columns(const std::vector<std::size_t>& widths, const std::vector<std::size_t>& shown) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

constexpr std::size_t kWidth = 80;  // of a terminal

// The text broken at spaces into lines of at most kWidth.
std::string wrapped(const std::string& text);

std::string bold(const std::string& text);
std::string faint(const std::string& text);

// One line on standard error that tells what is being done now, rewritten at each step and removed at the end.
class Progress {
 public:
  explicit Progress(std::size_t steps);
  ~Progress();
  void step(const std::string& what);
  void say(const std::string& what);  // within a step, or before the first
  void clear();                       // before something else is printed

 private:
  std::size_t steps_, done_ = 0;
  bool shown_, drawn_ = false;
};

// A JSON array on standard output, an object per line.
void print_json(const std::vector<nlohmann::ordered_json>& objects);

// Rejects if standard output did not take all that was printed to it.
void flush_output();

// The text with \xNN in place of bytes that are no UTF-8, as JSON wants strings.
std::string utf8(const std::string& text);

std::string seconds_text(double seconds);  // "1.23 ms"
std::string error_text(double error);      // "0.00163", "3.1e-06", "nan"

// A number in `format`; NaN of either sign is "nan".
std::string number_text(fmt::format_string<double&> format, double number);

}  // namespace octet::cli
