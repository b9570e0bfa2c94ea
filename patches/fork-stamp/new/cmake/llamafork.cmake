# SPDX-License-Identifier: MIT
#
# Which upstream build and which patch series this tree is. The llamafork tool passes both; a tree that is built
# by hand falls back to the pin it was made for, because a commit count says nothing here: a shallow clone counts
# 1 and a tarball 0. The commit stays what upstream makes of it.

if (NOT DEFINED LLAMA_FORK_PIN)
    set(LLAMA_FORK_PIN 11434)
endif()

if (NOT DEFINED LLAMA_BUILD_NUMBER)
    set(LLAMA_BUILD_NUMBER ${LLAMA_FORK_PIN})
endif()

set(LLAMA_FORK_SERIES "" CACHE STRING "llamafork: git tree hash of the patched source")

set(LLAMA_FORK_STAMP "${LLAMA_FORK_SERIES}")

# only when this folder is itself the top of a repository: one around it has nothing to do with us, and neither
# has the one that a git hook names in the environment
if (NOT LLAMA_FORK_STAMP AND Git_FOUND AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.git")
    execute_process(
        COMMAND ${CMAKE_COMMAND} -E env --unset=GIT_DIR --unset=GIT_WORK_TREE --unset=GIT_INDEX_FILE
                ${GIT_EXECUTABLE} rev-parse --verify "HEAD^{tree}"
        WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
        OUTPUT_VARIABLE LLAMA_FORK_STAMP
        OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_QUIET
    )
endif()

if (NOT LLAMA_FORK_STAMP)
    set(LLAMA_FORK_STAMP "unstamped")
elseif (NOT LLAMA_FORK_STAMP MATCHES "^[0-9a-f]+$")
    message(FATAL_ERROR "LLAMA_FORK_SERIES is a git tree hash, not '${LLAMA_FORK_STAMP}'")
endif()

message(STATUS "llamafork: b${LLAMA_BUILD_NUMBER}, series ${LLAMA_FORK_STAMP}")
