# Sourced by quickstart and test: what both need before Python code of ours can run.

setup_fail() { printf 'error: %s\n  do:  %s\n' "$1" "$2" >&2; exit 3; }

# the compiler and git are the only things that do not come with the Python environment
setup_environment() {
    local extras="$1" python=""
    for name in python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python="$name"
            break
        fi
    done
    [ -n "$python" ] || setup_fail "Python 3.11 or newer is not there" "install python3 (3.11+)"
    command -v git >/dev/null || setup_fail "git is not there" "install git"
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -q && apt-get install -q -y g++ libssl-dev
        else
            setup_fail "no C++ compiler is there" "install one (Debian: apt-get install g++ libssl-dev)"
        fi
    fi
    if [ ! -x .venv/bin/python ]; then
        "$python" -m venv .venv || setup_fail "cannot make a virtual environment" "Debian: apt-get install python3-venv"
    fi
    # installing again is skipped while the project file is the one that was installed
    local stamp
    stamp="$extras $(cksum < pyproject.toml)"
    if [ "$(cat .venv/.llamafork-installed 2>/dev/null)" != "$stamp" ]; then
        echo "setting up .venv (some 30 s the first time)"
        .venv/bin/python -m pip install -q --disable-pip-version-check -e ".[$extras]"
        printf '%s' "$stamp" > .venv/.llamafork-installed
    fi
}
