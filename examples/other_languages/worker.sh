#!/usr/bin/env bash
# A worker in bash: it needs psql, and runs the steps of the machine "report" and of its pages. See reports.py.
#
#   DURABLE_DSN=postgresql://... ./worker.sh
#
# Secrets go through the environment of psql, not through its arguments: those are visible to all users of the machine.
set -uo pipefail
: "${DURABLE_DSN:?set it to the database of durable_actors}"
export id claim_id token outcome error owner="bash-$$"
lease=${LEASE:-"1 minute"} every=${HEARTBEAT_EVERY:-20}

sql() {  # statements from standard input; columns are separated by tabs
    { for name in id claim_id token outcome error owner; do printf '\\set %s `printenv %s`\n' "$name" "$name"; done; cat; } |
        psql "$DURABLE_DSN" --no-psqlrc --quiet --no-align --tuples-only --field-separator=$'\t' --set ON_ERROR_STOP=1
}

claim() {
    sql <<SQL
select id, claim_id, token, machine || '/' || step, attempt, coalesce(state->>'pages', state->>'page', '-'),
       coalesce(awaited->0->'payload'->>'by', state->>'by', '-'), (select jsonb_agg(c->'result') from jsonb_array_elements(children) c)
  from durable.claim_next('reports', '{report/start,report/ask,report/write,report/finish,page/start}', :'owner', '$lease');
SQL
}

# Each step prints its outcome. One that fails says why on standard error.
step() {
    case $1 in
    report/start)  echo '{"next": "ask"}' ;;
    report/ask)    echo '{"await": "approved", "then": "write", "timeout": 3600}' ;;
    report/write)  children=
                   for ((page = 1; page <= $3; page++)); do
                       children+="${children:+, }{\"machine\": \"page\", \"queue\": \"reports\", \"state\": {\"page\": $page}}"
                   done
                   echo "{\"children\": [$children], \"then\": \"finish\", \"state\": {\"by\": \"$4\"}}" ;;
    report/finish) echo "{\"done\": {\"pages\": $5, \"by\": \"$4\"}}" ;;
    page/start)    if (($3 == 2 && $2 == 0)); then echo "the ink has run out" >&2; return 1; fi
                   sleep "${PAGE_TAKES:-0}"
                   echo "{\"done\": \"page $3\"}" ;;
    esac
}

heartbeats() {  # until the step has ended; if the claim is lost, the step is stopped
    while sleep "$every"; do
        sql <<<"select 1 from durable.heartbeat(:id, :'claim_id', :'token', '$lease');" &>/dev/null || { kill "$1"; return; }
    done
}

work() {  # one claim; false if there was none
    local place attempt number by results said
    IFS=$'\t' read -r id claim_id token place attempt number by results < <(claim) || return 1
    said=$(mktemp)
    step "$place" "$attempt" "$number" "$by" "$results" >"$said" 2>"$said.err" &
    local running=$!
    heartbeats "$running" &
    local beating=$!
    local well=true
    wait "$running" || well=false
    { kill "$beating"; wait "$beating"; } 2>/dev/null
    if $well; then
        outcome=$(<"$said")
        sql <<<"select verdict, status from durable.complete(:id, :'claim_id', :'token', :'outcome');" | sed "s|^|$id $place: |"
    elif [[ -s $said.err ]]; then
        error=$(<"$said.err")
        sql <<<"select verdict, status from durable.fail(:id, :'claim_id', :'token', to_jsonb(:'error'::text), '1 second');" | sed "s|^|$id $place failed: |"
    fi  # else it was stopped, because its claim is lost: somebody else runs it
    rm -f "$said" "$said.err"
}

trap 'exit 0' TERM INT
while true; do
    work || sleep "${POLL:-1}"
done
