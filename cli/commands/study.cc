#include "commands/commands.h"
namespace octet::cli { void add_study(CLI::App&) {} }
