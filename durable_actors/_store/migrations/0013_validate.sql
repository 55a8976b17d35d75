-- Check the constraints of 0012 on the rows that were there before: SHARE UPDATE EXCLUSIVE, everybody reads and writes meanwhile.

alter table durable.gen_durable validate constraint gen_durable_finished;
alter table durable.gen_durable validate constraint gen_durable_counts;
