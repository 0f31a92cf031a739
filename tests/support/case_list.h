// The file of cases, tests/cases.json, which the tests of Python read too (tests/python/case_list.py).
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "support/cases.h"

namespace octet::test {

// Reads {group: [{"name": ..., field of Case: value, "note": words}]}, in the order of the text. Throws
// std::runtime_error, which names what was found and what is allowed, for text that is no such file: an unknown field
// or value, a value of another type, a name that is missing or taken. The names are added to `names`, which must
// outlive the cases.
std::vector<Case> read_cases(const std::string& text, std::deque<std::string>& names);

}  // namespace octet::test
