#!/usr/bin/env bash
# Runs 'genesis populate' in the background, one process a source.
#
#   genesis_ctl.sh start SOURCE [-- populate options]   e.g. start fineweb-edu -- --store s3://bucket/prefix
#   genesis_ctl.sh stop SOURCE                          ends it cleanly after the commit in hand
#   genesis_ctl.sh status [SOURCE] [-- status options]  without SOURCE: all of them, then 'genesis status'
#   genesis_ctl.sh logs SOURCE [-f]                     the end of its log; -f follows it
#
# logs/genesis_SOURCE.pid holds the process id and when that process started, so that a stale file, or one whose number
# another program has been given since, is told from a populator at work. logs/genesis_SOURCE.log is appended to.
# Ends with 0; with 1 if it could not be done; 2 for a wrong command line; 3 from 'status SOURCE' if it is not running.
#
# GENESIS_LOG_DIR (default: logs beside scripts/), GENESIS_BIN (default: genesis of .venv, else of PATH) and
# GENESIS_STOP_TIMEOUT_S (default: 300) may be set, and GENESIS_START_GRACE_S (default: 2), for how long 'start' watches
# what it started.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log_dir=${GENESIS_LOG_DIR:-$root/logs}
stop_timeout_s=${GENESIS_STOP_TIMEOUT_S:-300}
start_grace_s=${GENESIS_START_GRACE_S:-2}

usage() {
  sed -n '4,7s/^# \{0,3\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

fail() {
  echo "genesis_ctl: $1" >&2
  exit "${2:-1}"
}

genesis_bin() {
  if [ -n "${GENESIS_BIN:-}" ]; then
    echo "$GENESIS_BIN"
  elif [ -x "$root/.venv/bin/genesis" ]; then
    echo "$root/.venv/bin/genesis"
  else
    command -v genesis || fail "no 'genesis' found; run scripts/quickstart.sh once, or set GENESIS_BIN"
  fi
}

check_source() {
  [[ ${1:-} =~ ^[a-z0-9][a-z0-9._-]{0,63}$ ]] || fail "expected the name of a source such as fineweb-edu, found '${1:-}'" 2
  source_name=$1
  pid_file=$log_dir/genesis_$1.pid
  log_file=$log_dir/genesis_$1.log
}

# When a process started, in whatever form the system tells; nothing if there is no such process.
started_at() {
  if [ -r /proc/self/stat ]; then
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    stat=${stat##*) }
    # A zombie has ended; it only waits for its parent to notice.
    [ "${stat%% *}" = Z ] || awk '{ print $20 }' <<<"$stat"
  else
    ps -o lstart= -p "$1" 2>/dev/null || true
  fi
}

# Sets pid if the file names a process that is still the one that was started.
is_running() {
  pid='' since=''
  [ -f "$1" ] || return 1
  { read -r pid && read -r since; } <"$1" || return 1
  [[ $pid =~ ^[0-9]+$ ]] && [ -n "$since" ] && [ "$(started_at "$pid")" = "$since" ]
}

# Of two starts at once only one goes on: the lock is on the log, and ends with this shell.
claim() {
  mkdir -p "$log_dir" && exec 9>>"$log_file" || fail "cannot write $log_file"
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    fail "$source_name is being started by another genesis_ctl.sh"
  fi
  if is_running "$pid_file"; then
    fail "$source_name is running already (process $pid); see: genesis_ctl.sh status $source_name"
  fi
}

start() {
  local bin detach=()
  bin=$(genesis_bin)
  claim
  # A session of its own: no signal that ends this terminal reaches it.
  if command -v setsid >/dev/null; then detach=(setsid); fi
  printf '== %s %s populate --source %s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$bin" "$source_name" "$*" >>"$log_file"
  ${detach[@]+"${detach[@]}"} nohup "$bin" populate --source "$source_name" "$@" >>"$log_file" 2>&1 </dev/null 9>&- &
  local child=$!
  printf '%s\n%s\n' "$child" "$(started_at "$child")" >"$pid_file.new"
  mv "$pid_file.new" "$pid_file"
  wait_for_start "$child"
}

# What fails at once (a wrong option, a store that is held) is told here and not only in the log.
wait_for_start() {
  local child=$1 rc=0 tenths
  for ((tenths = 0; tenths < 10 * start_grace_s; tenths++)); do
    if ! is_running "$pid_file"; then
      wait "$child" || rc=$?
      rm -f "$pid_file"
      tail -n 5 "$log_file" >&2
      [ "$rc" -eq 0 ] || fail "$source_name ended with status $rc; see $log_file"
      echo "$source_name has ended already; see $log_file"
      return
    fi
    sleep 0.1
  done
  echo "$source_name is running (process $child), log in $log_file"
}

stop() {
  if ! is_running "$pid_file"; then
    rm -f "$pid_file"
    echo "$source_name is not running"
    return
  fi
  kill -TERM "$pid" 2>/dev/null || true
  local deadline=$((SECONDS + stop_timeout_s))
  while is_running "$pid_file"; do
    if [ "$SECONDS" -ge "$deadline" ]; then
      fail "$source_name (process $pid) still runs after $stop_timeout_s s; see $log_file (nothing committed is lost by kill -9 $pid)"
    fi
    sleep 0.1
  done
  rm -f "$pid_file"
  echo "$source_name has stopped"
}

status_one() {
  if is_running "$pid_file"; then
    echo "$source_name: running (process $pid); $(last_line)"
  elif [ -f "$pid_file" ]; then
    echo "$source_name: not running (process ${pid:-?} is gone, without a stop); $(last_line)"
    return 3
  else
    echo "$source_name: not running"
    return 3
  fi
}

last_line() {
  [ -s "$log_file" ] && tail -n 1 "$log_file" || echo "nothing in its log"
}

status_all() {
  local file name bin
  for file in "$log_dir"/genesis_*.pid; do
    [ -f "$file" ] || continue
    name=${file##*/genesis_}
    check_source "${name%.pid}"
    status_one || true
  done
  bin=$(genesis_bin)
  "$bin" status "$@"
}

logs() {
  [ -f "$log_file" ] || fail "$source_name has no log yet ($log_file)"
  case ${1:-} in
    '') tail -n 50 "$log_file" ;;
    -f) exec tail -n 50 -F "$log_file" ;;
    *) usage ;;
  esac
}

# The arguments behind '--'; anything before it is a mistake.
after_dashes() {
  extra=()
  [ $# -eq 0 ] && return
  [ "$1" = -- ] || usage
  shift
  extra=("$@")
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
  start)
    check_source "${1:-}"
    shift
    after_dashes "$@"
    start ${extra[@]+"${extra[@]}"}
    ;;
  stop)
    check_source "${1:-}"
    [ $# -eq 1 ] || usage
    stop
    ;;
  status)
    if [ $# -gt 0 ] && [ "$1" != -- ]; then
      check_source "$1"
      [ $# -eq 1 ] || usage
      status_one
    else
      after_dashes "$@"
      status_all ${extra[@]+"${extra[@]}"}
    fi
    ;;
  logs)
    check_source "${1:-}"
    shift
    logs "$@"
    ;;
  *) usage ;;
esac
