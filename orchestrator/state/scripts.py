"""Lua scripts. Each script changes the store completely or not at all.

A full store refuses a script's first write if it needs memory, but not the script's later writes.
So scripts that must work in a full store begin with a write that needs no memory.

A task has one owner. Every write checks the owner's tag: if an orchestrator stalls longer than its
lease, its tasks have other owners, and it writes nothing more.
"""

ACCEPT = """
-- KEYS: task, held, submission. ARGV: id, owner, row, request, named (1 or 0)
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
if ARGV[5] == '1' and not redis.call('SET', KEYS[3], ARGV[1], 'NX') then return 2 end
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'row', ARGV[3], 'request', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
return 0
"""
"""Accept a task. 2: another task has the submission's name."""

TOKENS = """
-- KEYS: task, tokens. ARGV: owner, tokens
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return 0 end
if owner ~= ARGV[1] then return 1 end
if ARGV[2] ~= '' then redis.call('RPUSH', KEYS[2], ARGV[2]) end
return 0
"""
"""Append tokens to a task, if there are any. 1: the task has another owner."""

END = """
-- KEYS: task, tokens, held, submission, result
-- ARGV: id, owner, end, result, keep_ms, keep_result_ms, accepted (1 or 0)
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return 0 end
if owner ~= ARGV[2] then return 1 end
redis.call('SREM', KEYS[3], ARGV[1])
if redis.call('HEXISTS', KEYS[1], 'end') == 1 then return 0 end
redis.call('DEL', KEYS[2])
if ARGV[7] == '0' then
  if redis.call('GET', KEYS[4]) == ARGV[1] then redis.call('DEL', KEYS[4]) end
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('HDEL', KEYS[1], 'request')
redis.call('HSET', KEYS[1], 'end', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
if redis.call('GET', KEYS[4]) == ARGV[1] then redis.call('PEXPIRE', KEYS[4], ARGV[5]) end
redis.call('SET', KEYS[5], ARGV[4], 'PX', ARGV[6])
return 0
"""
"""End a task. The first end counts. 1: the task has another owner. A task that was never accepted
(accepted 0) is removed."""

RENEW = """
-- KEYS: layout, alive, members. ARGV: tag, member, lease_ms, the layout that is known
local layout = redis.call('GET', KEYS[1])
if layout and layout ~= ARGV[4] then return {} end
local was_alive = redis.call('PEXPIRE', KEYS[2], ARGV[3]) -- takes no memory
redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
local was = redis.call('HGET', KEYS[3], ARGV[1])
if was ~= ARGV[2] then redis.call('HSET', KEYS[3], ARGV[1], ARGV[2]) end
local found = redis.call('TIME')
found[3] = was and was_alive or 0
local stem, all = string.sub(KEYS[2], 1, -1 - #ARGV[1]), redis.call('HGETALL', KEYS[3])
for at = 1, #all, 2 do
  found[#found + 1] = all[at]
  found[#found + 1] = all[at + 1]
  found[#found + 1] = redis.call('EXISTS', stem .. all[at])
end
return found
"""
"""Renew a lease. Returns the store's time (seconds, microseconds), whether the lease was still
valid, and for each member its tag, its description, and whether it is alive. Returns nothing if the
store has another layout."""

LEAVE = """
-- KEYS: alive, held, members. ARGV: tag
redis.call('DEL', KEYS[1])
if redis.call('SCARD', KEYS[2]) == 0 then redis.call('HDEL', KEYS[3], ARGV[1]) end
return 0
"""
"""End a lease. A member with remaining tasks is kept until they are taken over."""

CLAIM = """
-- KEYS: alive and held of the dead one, held of the new owner, members
-- ARGV: dead tag, new tag, most, stem of task names
if redis.call('EXISTS', KEYS[1]) == 1 then return {} end
local claimed = {}
for _, id in ipairs(redis.call('SPOP', KEYS[2], ARGV[3])) do
  local task = ARGV[4] .. id
  -- A record of another type must not lose the other ids, which are no longer in the set.
  if redis.pcall('HEXISTS', task, 'request') == 1 then
    redis.call('HSET', task, 'owner', ARGV[2])
    redis.call('SADD', KEYS[3], id)
    claimed[#claimed + 1] = id
  end
end
if redis.call('SCARD', KEYS[2]) == 0 then redis.call('HDEL', KEYS[4], ARGV[1]) end
return claimed
"""
"""Take over some of a dead member's tasks. Returns their ids; empty if no tasks remain."""

KEEP_ITEM = """
-- KEYS: item. ARGV: owner, keep_ms, kind, key, name, copy
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return 1 end
redis.call('HSET', KEYS[1], 'owner', owner or ARGV[1], 'kind', ARGV[3], 'key', ARGV[4],
  'name', ARGV[5], 'copy', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 0
"""
"""Keep the copy of an item. 1: the item has another owner."""

USE_ITEM = """
-- KEYS: item. ARGV: owner, keep_ms
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return 2 end
if owner ~= ARGV[1] then return 1 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 0
"""
"""Keep the copy of an item longer. 1: the item has another owner; 2: there is no copy."""

DROP_ITEM = """
-- KEYS: item. ARGV: owner
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""
"""Remove the copy of an item, unless the item has another owner."""

CLAIM_ITEM = """
-- KEYS: item. ARGV: new owner, stem of names of who is alive
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return {} end
if owner ~= ARGV[1] then
  if redis.call('EXISTS', ARGV[2] .. owner) == 1 then return {owner} end
  redis.call('HDEL', KEYS[1], 'owner') -- takes no memory
  redis.call('HSET', KEYS[1], 'owner', ARGV[1])
end
return redis.call('HMGET', KEYS[1], 'kind', 'key', 'name', 'copy')
"""
"""Take over an item of a dead owner. Returns its kind, key, name and copy; only the owner if that
is alive; nothing if there is no such item."""

TAKE = """
-- ARGV: prefix, tag, tokens, then for each account: name, requests_per_min, tokens_per_min,
-- concurrent, running here
local at = redis.call('TIME')
local now = at[1] + at[2] / 1e6
local prefix, tag = ARGV[1], ARGV[2]
redis.call('DEL', prefix .. 'nothing') -- takes no memory
local function rate(kind, name) return prefix .. 'rate:' .. kind .. ':' .. name end
local function paid_until(key) return math.max(now, tonumber(redis.call('GET', key) or '0')) end
local function wait_s(key, per_min, count)
  return paid_until(key) - now + (count - 1e-6) * 60 / per_min - 60
end
local found = {}
for i = 4, #ARGV, 5 do
  local name, requests, tokens = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local concurrent, running = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  local at_once = prefix .. 'running:' .. name
  if concurrent > 0 then
    local all = redis.call('HGETALL', at_once)
    for each = 1, #all, 2 do
      if all[each] ~= tag then
        if redis.call('EXISTS', prefix .. 'alive:' .. all[each]) == 1 then
          running = running + tonumber(all[each + 1])
        else
          redis.call('HDEL', at_once, all[each])
        end
      end
    end
    if running > concurrent then return {'refused', 'concurrent', name, '0'} end
  end
  if requests > 0 and wait_s(rate('requests', name), requests, 1) > 0 then
    return {'refused', 'requests', name, tostring(wait_s(rate('requests', name), requests, 1))}
  end
  if tokens > 0 and wait_s(rate('tokens', name), tokens, tonumber(ARGV[3])) > 0 then
    local wait = wait_s(rate('tokens', name), tokens, tonumber(ARGV[3]))
    return {'refused', 'tokens', name, tostring(wait)}
  end
end
for i = 4, #ARGV, 5 do
  local name = ARGV[i]
  for kind, more in pairs({requests = {ARGV[i + 1], 1}, tokens = {ARGV[i + 2], ARGV[3]}}) do
    local per_min = tonumber(more[1])
    if per_min > 0 then
      local key = rate(kind, name)
      local paid = paid_until(key) + more[2] * 60 / per_min
      redis.call('SET', key, string.format('%.6f', paid), 'PX', math.ceil(1000 * (paid - now)) + 1)
      found[#found + 1] = kind
      found[#found + 1] = name
      found[#found + 1] = string.format('%.6f', paid - now)
    end
  end
  if tonumber(ARGV[i + 3]) > 0 then
    redis.call('HSET', prefix .. 'running:' .. name, tag, ARGV[i + 4])
  end
end
return found
"""
"""Charge a request and its tokens to the rates of all accounts, or to none (generic cell rate
algorithm, as in ``admission.rate_limits``). Returns ``refused`` and the limit that refuses it
(kind, account, seconds until it would allow it), else for each rate its kind, account, and seconds
until it is full again."""

GIVE_BACK = """
-- ARGV: prefix, tag, name, tokens_per_min, unused tokens, running here
local key = ARGV[1] .. 'rate:tokens:' .. ARGV[3]
redis.call('DEL', ARGV[1] .. 'nothing') -- takes no memory
local paid = redis.call('GET', key)
if paid and tonumber(ARGV[4]) > 0 then
  local left = string.format('%.6f', tonumber(paid) - ARGV[5] * 60 / ARGV[4])
  redis.call('SET', key, left, 'KEEPTTL')
end
redis.call('HSET', ARGV[1] .. 'running:' .. ARGV[3], ARGV[2], ARGV[6])
return 0
"""
"""Give back a request's unused tokens, and report the number of requests that run here now."""

RUNS = """
-- KEYS: runs. ARGV: tag, last id that is known, most entries, keep_ms, then news
redis.call('PEXPIRE', KEYS[1], ARGV[4]) -- takes no memory
for i = 5, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'by', ARGV[1], 'news', ARGV[i])
end
return redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', 512)
"""
"""Publish runs and read all later entries with their ids."""

WRITE_LINES = """
-- ARGV: stem of names of pages, keep_ms, then for each line: page, name, numbers (JSON)
for i = 3, #ARGV, 3 do
  local page = ARGV[1] .. ARGV[i]
  local was = redis.call('HGET', page, ARGV[i + 1])
  if not was or cjson.decode(was)[1] < cjson.decode(ARGV[i + 2])[1] then
    redis.call('HSET', page, ARGV[i + 1], ARGV[i + 2])
  end
  redis.call('PEXPIRE', page, ARGV[2])
end
return 0
"""
"""Write lines. Of two lines with the same name, the one with the larger first number stays."""

DEMANDS = """
-- KEYS: demands of each instance. ARGV: tag, stem of names of who is alive, keep_ms, then for each
-- instance: this one's demand, empty for none
local is_alive = {[ARGV[1]] = true}
local function lives(tag)
  if is_alive[tag] == nil then is_alive[tag] = redis.call('EXISTS', ARGV[2] .. tag) == 1 end
  return is_alive[tag]
end
local found = {}
for at, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, ARGV[3]) -- takes no memory
  local demand = ARGV[at + 3]
  if demand == '' then
    redis.call('HDEL', key, ARGV[1])
  else
    redis.call('HSET', key, ARGV[1], demand)
    redis.call('PEXPIRE', key, ARGV[3])
    local told, all = {}, redis.call('HGETALL', key)
    for each = 1, #all, 2 do
      if lives(all[each]) then
        told[all[each]] = tonumber(all[each + 1])
      else
        redis.call('HDEL', key, all[each])
      end
    end
    found[#found + 1] = told
  end
end
return cjson.encode(found)
"""
"""Publish demands on instances, and read the demands of all live orchestrators. Returns JSON: for
each instance on which this orchestrator has a demand, in the order of the keys, demands by tag."""
