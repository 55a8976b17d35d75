-- Limits of attempts, given with an insert.

alter table durable.gen_durable add column max_attempts int;

comment on column durable.gen_durable.max_attempts is 'durable_actors: how often a job, or a step with a retry policy, runs at most; null: what its code says';

-- fail (0024): the limit of the row goes before that of the caller. A caller who says 0 means that no run is left.
create or replace function durable.fail(id bigint, claim_id uuid, token text, error jsonb, retry_in interval default null, max_attempts int default 20,
                             late boolean default true)
returns table (verdict text, status text, step text, visit bigint, attempt int, eligible_at timestamptz)
language plpgsql volatile
set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    r durable.gen_durable;
    delay float8 := extract(epoch from retry_in);
begin
    if delay < 0 or delay > 3155760000 then
        raise exception 'retry_in must be between 0 and 100 years; it is %', retry_in using errcode = 'RD004';
    end if;
    r := durable.own_claim(fail.id, fail.claim_id, token, late);
    if r.locked_by is null then
        if durable.conflicts(r, fail.claim_id, 'retry', null, null, null) and durable.conflicts(
               r, fail.claim_id, case when r.cancellation is null then 'failed' else 'cancelled' end, null, null, null) then
            raise exception 'instance %: this claim was completed, and did not fail; nothing was written', fail.id using errcode = 'RD003';
        end if;
        return query select 'already_completed', r.status::text, r.step, r.visit, r.attempt, r.eligible_at;
        return;
    end if;
    if durable.asked_to_cancel(r.request) then
        perform durable.cancel_claim(r, late);
    elsif fail.max_attempts < 1 or r.attempt + 1 >= coalesce(r.max_attempts, fail.max_attempts) then
        perform durable.commit_claim(r, late, 'failed', 'failed', r.step, null, null, r.attempt, 0, 0, durable.error_of(error),
                                     false, null, null, false, null, null, '{}', '{}');
    else
        perform durable.commit_claim(
            r, late, 'retry', 'runnable', r.step, null, null, least(r.attempt, 2147483646) + 1, 0,
            coalesce(delay, least(2 ^ least(r.attempt, 9), 300) * (0.5 + 0.5 * random())), durable.error_of(error),
            false, null, null, true, null, null, '{}', '{}');
    end if;
    return query select 'committed', g.status::text, g.step, g.visit, g.attempt, g.eligible_at from durable.gen_durable g where g.id = fail.id;
end $$;
