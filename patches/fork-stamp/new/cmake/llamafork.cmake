# SPDX-License-Identifier: MIT
#
# Which upstream build and which patch series this tree is. The llamafork tool passes both; a tree that is built
# by hand falls back to the pin it was made for, because a commit count says nothing here: a shallow clone counts
# 1 and a tarball 0.

set(LLAMA_FORK_PIN 11434)

if (NOT DEFINED LLAMA_BUILD_NUMBER)
    set(LLAMA_BUILD_NUMBER ${LLAMA_FORK_PIN})
    set(LLAMA_BUILD_COMMIT "b${LLAMA_FORK_PIN}")
endif()

set(LLAMA_FORK_SERIES "" CACHE STRING "llamafork: git tree hash of the patched source")

if (LLAMA_FORK_SERIES)
    set(LLAMA_FORK_STAMP "${LLAMA_FORK_SERIES}")
else()
    set(LLAMA_FORK_STAMP "unstamped")
    # only when this folder is itself the top of a repository: one around it has nothing to do with us
    if (Git_FOUND AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.git")
        execute_process(
            COMMAND ${GIT_EXECUTABLE} rev-parse "HEAD^{tree}"
            WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
            OUTPUT_VARIABLE LLAMA_FORK_TREE
            OUTPUT_STRIP_TRAILING_WHITESPACE
            ERROR_QUIET
            RESULT_VARIABLE LLAMA_FORK_RES
        )
        if (LLAMA_FORK_RES EQUAL 0)
            set(LLAMA_FORK_STAMP "${LLAMA_FORK_TREE}")
        endif()
    endif()
endif()

message(STATUS "llamafork: b${LLAMA_BUILD_NUMBER}, series ${LLAMA_FORK_STAMP}")
