-- examine_indexes: the indexes of the schema, and whether each can be used. For `doctor`.
-- params   $1 schema text
-- returns  index, valid
-- locks    none
select c.relname, i.indisvalid and i.indisready
  from pg_index i join pg_class c on c.oid = i.indexrelid join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = $1::text order by c.relname
