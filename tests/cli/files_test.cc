// The readers of files: what they accept they read exactly, what is malformed they reject by name, and files are
// written whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "error.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "io/sink.h"
#include "io/source.h"
#include "names.h"

namespace octet::cli {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class Files : public testing::Test {
 protected:
  Files() : folder_(fs::temp_directory_path() / ("octet_files_test." + std::to_string(::getpid()))) {
    fs::create_directory(folder_);
  }
  ~Files() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::string safetensors(const std::string& header, std::size_t data_bytes) const {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
    return write("x.safetensors", bytes + header + std::string(data_bytes, '\0'));
  }
  std::size_t entries() const { return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {})); }

  fs::path folder_;
};

std::string rejection(auto&& action) {
  try {
    action();
  } catch (const Rejection& rejection) {
    return rejection.what();
  }
  return "nothing rejected";
}

constexpr const char* kGood =
    R"({"__metadata__":{"by":"hand"},"q":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";

TEST_F(Files, safetensors_round_trip_keeps_every_bit_and_type) {
  std::vector<Array> arrays;
  for (const auto& [text, dtype] : kDTypes)
    if (dtype != DType::i4) arrays.emplace_back(dtype, Shape{1, 2, 3, 8});
  std::vector<NamedArray> named;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    for (int64_t j = 0; j < arrays[i].size(); ++j)
      arrays[i].set(j, arrays[i].dtype == DType::boolean ? static_cast<double>(j % 2) : static_cast<double>(j % 7));
    named.push_back({"tensor" + std::to_string(i), &arrays[i]});
  }
  write_arrays(path("all.safetensors"), named);
  const Source source(path("all.safetensors"));
  for (const auto& [name, array] : named) {
    const Array read = source.read(name);
    EXPECT_EQ(read.dtype, array->dtype);
    EXPECT_EQ(read.shape, array->shape);
    EXPECT_EQ(read.bytes, array->bytes);
  }
}

TEST_F(Files, npy_directory_round_trip_keeps_every_bit_and_type) {
  for (DType dtype :
       {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i8, DType::u8, DType::i32, DType::boolean}) {
    Array array(dtype, Shape{2, 1, 3, 8});
    for (int64_t j = 0; j < array.size(); ++j) array.set(j, static_cast<double>(j % 2));
    write_arrays(path("folder"), {{"q", &array}});
    const Array read = Source(path("folder")).read("q");
    EXPECT_EQ(read.dtype, dtype);
    EXPECT_EQ(read.shape, array.shape);
    EXPECT_EQ(read.bytes, array.bytes);
  }
}

TEST_F(Files, safetensors_that_is_good_is_read) {
  const Safetensors file{File(safetensors(kGood, 8))};
  EXPECT_EQ(file.read("q").size(), 2);
}

TEST_F(Files, safetensors_headers_that_are_not_right_are_rejected_by_name) {
  struct Case {
    const char* header;
    std::size_t data_bytes;
    const char* message;
  };
  const Case cases[] = {
      {kGood, 7, "ends at byte 8, but the file holds 7"},
      {kGood, 9, "bytes 8 to 9 belong to no tensor"},
      {"[]", 0, "does not begin with {"},
      {"{", 0, "not JSON"},
      {"{} {}", 0, "not JSON"},
      {R"({"q":1})", 0, "found a number in \"q\""},
      {R"({"q":{}})", 0, "has no dtype"},
      {R"({"q":{"dtype":"F32","shape":[2]}})", 8, "has no data_offsets"},
      {R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8, "has a field \"x\""},
      {R"({"q":{"dtype":"F12","shape":[2],"data_offsets":[0,8]}})", 8, "unknown dtype \"F12\""},
      {R"({"q":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "negative dimension -2"},
      {R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8, "negative offset -8"},
      {R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "before its begin"},
      {R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", 8, "more than 2 data_offsets"},
      {R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "has 1 data_offsets"},
      {R"({"q":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8, "found the number 2.5"},
      {R"({"q":{"dtype":"F32","shape":[1e300],"data_offsets":[0,8]}})", 8, "found the number 1e300"},
      {R"({"q":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}})", 8, "found the number"},
      {R"({"q":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8,
       "more elements than memory can hold"},
      {R"({"q":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,8]}})", 8,
       "more elements than memory can hold"},
      {R"({"q":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0,
       "more elements than memory can hold"},
      {R"({"q":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "needs 12 bytes, but its data_offsets hold 8"},
      {R"({"q":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"k":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "inside another tensor"},
      {R"({"q":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"k":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "inside another tensor"},
      {R"({"q":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6, "bytes 0 to 2 belong to no tensor"},
      {R"({"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "\"q\" occurs twice"},
      {R"({"q":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "\"dtype\" occurs twice"},
      {R"({"__metadata__":{"a":{"b":"c"}}})", 0, "found an object"},
      {R"({"q":{"dtype":"U8","shape":[[0]],"data_offsets":[0,0]}})", 0, "found an array"},
      {R"({"q":null})", 0, "found null"},
      {R"({"q":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
       "more than 16 dimensions"},
  };
  for (const Case& c : cases) {
    const std::string name = safetensors(c.header, c.data_bytes);
    const std::string message = rejection([&] { Safetensors{File(name)}; });
    EXPECT_THAT(message, HasSubstr(c.message)) << c.header;
    EXPECT_THAT(message, HasSubstr(name));
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

TEST_F(Files, a_million_brackets_are_rejected_at_the_first_wrong_one) {
  EXPECT_THAT(rejection([&] { Safetensors{File(safetensors("{\"q\":" + std::string(1'000'000, '['), 0))}; }),
              HasSubstr("found an array in \"q\""));
}

TEST_F(Files, safetensors_shorter_than_they_claim_are_rejected) {
  EXPECT_THAT(rejection([&] { Safetensors{File(write("a", "1234567"))}; }),
              HasSubstr("too few for a safetensors header"));
  EXPECT_THAT(rejection([&] { Safetensors{File(write("a", std::string("\x10\0\0\0\0\0\0\0{}", 10)))}; }),
              HasSubstr("truncated: header of 16 bytes"));
  EXPECT_THAT(rejection([&] { Safetensors{File(write("a", std::string("\0\0\0\0\0\0\0\x10{}", 10)))}; }),
              HasSubstr("header of 1152921504606846976 bytes"));
}

TEST_F(Files, dtypes_of_the_format_that_the_library_lacks_hinder_only_who_asks_for_them) {
  const Safetensors file{File(safetensors(
      R"({"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"q":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})",
      9))};
  EXPECT_EQ(file.read("q").size(), 1);
  EXPECT_THAT(rejection([&] { file.read("ids"); }), HasSubstr("dtype I64, allowed: F64, F32"));
}

TEST_F(Files, npy_headers_that_are_not_right_are_rejected_by_name) {
  struct Case {
    const char* header;
    const char* message;
  };
  const Case cases[] = {
      {"{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }", "Fortran order"},
      {"{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }", "unknown dtype '>f4', allowed: <f8"},
      {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", "expected a string"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", "a dimension of 0 or more"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", "beyond 2^63"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,, }", "a dimension of 0 or more"},
      {"{'descr': '<f4', 'fortran_order': False, }", "no shape"},
      {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", "'descr' occurs twice"},
      {"{'descr': '<f4', 'fortran_order': maybe, 'shape': (1,), }", "True or False"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), } x", "the end"},
      {"{'a': '<f4'}", "unknown key 'a'"},
      {"", "expected '{'"},
  };
  for (const Case& c : cases)
    EXPECT_THAT(rejection([&] { parse_npy_header(c.header); }), HasSubstr(c.message)) << c.header;
}

TEST_F(Files, npy_data_must_fill_the_shape_exactly) {
  Array array(DType::f32, Shape{1, 1, 2, 8});
  write_arrays(path("d"), {{"q", &array}});
  const std::string name = path("d/q.npy");
  const auto size = fs::file_size(name);
  for (const auto& [bytes, message] : {std::pair{size - 1, "truncated"},
                                       {size + 1, "too long"},
                                       {std::uintmax_t{9}, "too few"},
                                       {std::uintmax_t{20}, "too few"}}) {
    fs::resize_file(name, bytes);
    EXPECT_THAT(rejection([&] { read_npy(File(name)); }), HasSubstr(message));
  }
  EXPECT_THAT(rejection([&] { read_npy(File(write("text.npy", "hello, world"))); }), HasSubstr("not a .npy file"));
}

TEST_F(Files, a_file_not_committed_leaves_nothing) {
  {
    AtomicFile file(path("out"));
    file.write("half", 4);
    EXPECT_EQ(entries(), 1u);
  }
  EXPECT_EQ(entries(), 0u);
}

TEST_F(Files, a_committed_file_replaces_the_old_one_whole) {
  write("out", "old");
  AtomicFile file(path("out"));
  file.write("new content", 11);
  file.flush();
  EXPECT_EQ(fs::file_size(path("out")), 3u);
  file.commit();
  EXPECT_EQ(fs::file_size(path("out")), 11u);
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, outputs_that_cannot_be_written_are_rejected_before_work_and_leave_nothing) {
  write("in.safetensors", "");
  EXPECT_THAT(rejection([&] { expect_writable(path("none/out.safetensors"), "none", {}); }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(rejection([&] { expect_writable(path("none/out"), "none", {}); }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(rejection([&] { expect_writable(path("out.npy"), "none", {}); }), HasSubstr("one tensor"));
  EXPECT_THAT(rejection([&] { expect_writable(path("in.safetensors"), path("in.safetensors"), {}); }),
              HasSubstr("is an input"));
  EXPECT_THAT(rejection([&] { expect_writable("/dev/null", "none", {}); }), HasSubstr("cannot write"));
  expect_writable(path("out"), "none", {"o"});
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, npy_has_no_eight_bit_floats_and_says_so_before_writing) {
  Array array(DType::e4m3, Shape{1, 1, 1, 8});
  EXPECT_THAT(rejection([&] { write_arrays(path("d"), {{"o", &array}}); }), HasSubstr("no type for 8-bit floats"));
  EXPECT_EQ(entries(), 0u);
}

TEST_F(Files, what_is_absent_is_rejected_with_what_is_there) {
  EXPECT_THAT(rejection([&] { Source(safetensors(kGood, 8)).read("k"); }), HasSubstr("no tensor \"k\"; found: q"));
  EXPECT_THAT(rejection([&] { Source(path("")).read("k"); }), HasSubstr("no k.npy; found: nothing"));
  EXPECT_THAT(rejection([&] { Source(path("none")); }), HasSubstr("cannot open: No such file"));
  EXPECT_THAT(rejection([&] { Source("/dev/zero"); }), HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace octet::cli
