// SPDX-License-Identifier: MIT
#pragma once

#include <cstdio>
#include <string>

// git tree hash of the patched source (40 hex digits), or "unstamped"
const char * llama_fork_series(void);

// what is appended to llama_build_info(): "-lf." and the first 8 digits of the hash, or "-lf.unstamped"
std::string llama_fork_suffix(void);

// the line of --version: build number and the whole hash
void llama_fork_print(int build_number, FILE * stream);
