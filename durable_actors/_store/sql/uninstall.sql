-- uninstall: drop every object of ours, with its data. Several statements: one simple query, one transaction.
-- params   none
-- returns  nothing
-- locks    ACCESS EXCLUSIVE on the tables: waits for running transactions
drop table if exists durable.signals;
drop table if exists durable.nodes;
drop table if exists durable.gen_durable;
drop table if exists durable.migrations;
drop function if exists durable.judge_keys;
drop function if exists durable.judge_siblings;
drop function if exists durable.signal(bigint, text, jsonb, text);
drop function if exists durable.signal(text, text, jsonb, text);
drop function if exists durable.send_signals;
drop function if exists durable.drop_inbox;
drop function if exists durable.wait_for_work;
drop type if exists durable.durable_status;
